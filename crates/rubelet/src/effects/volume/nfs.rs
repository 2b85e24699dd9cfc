//! Setup of NFS volumes.
//!
//! Owns: the mount of the server's directory at the pod's. Never: changes the owner of files, as upstream.
//! Upstream: `pkg/volume/nfs`.

use rubelet_core::{
    effect::EffectError,
    volumes::{claims::PersistentSource, nfs::NfsVolume},
};

use super::{
    DIR_MODE, VolumePod, make_dir,
    mounting::{self, Mount, Scope},
};
use crate::{effects::directories::component, world::World};

pub(super) async fn set_up(
    world: &World,
    owner: &VolumePod<'_>,
    source: &PersistentSource,
    volume: &NfsVolume,
) -> Result<(), EffectError> {
    component(&source.name)?;
    let target = source.path(owner.dir);
    if mounting::is_mounted(world, &target).await? {
        return Ok(());
    }
    make_dir(world, &world.paths.pods_dir(), &target, DIR_MODE).await?;
    let (device, options) = (volume.device(), volume.options(source.read_only));
    let order = Mount { source: &device, target: &target, fs_type: "nfs", options: &options };
    mounting::mount(world, order, Scope::Agent).await
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rubelet_core::{id::PodUid, volumes::claims::PersistentKind};
    use rubelet_host::{lanes::Lanes, linux::LinuxHost};
    use serde_json::json;

    use super::*;
    use crate::{
        effects::{
            directories::{make_pod_dirs, tests::pod_ref},
            volume::{set_up_volume, tear_down_volumes},
        },
        world::testing::world_in,
    };

    #[tokio::test]
    async fn failed_nfs_mount_shows_its_command_and_leaves_no_directory() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let volume = NfsVolume {
            server: "127.0.0.1".to_owned(),
            path: "/exported-by-nobody".to_owned(),
            // Whether or not this machine has NFS, it does not try for long.
            mount_options: ["port=1", "proto=tcp", "retry=0", "timeo=10"].map(str::to_owned).to_vec(),
        };
        let kind = PersistentKind::Nfs(volume);
        let source = PersistentSource {
            name: "pv".to_owned(),
            read_only: true,
            is_exclusive: false,
            kind,
            size: None,
            group: None,
        };
        make_pod_dirs(&world, &pod_ref("0001")).await.unwrap();
        let uid = PodUid::new("0001");
        let pod = serde_json::from_value(json!({"metadata": {}, "spec": {"containers": []}})).unwrap();
        let error = set_up_volume(&world, &pod, &uid, "data", Some(&source)).await.unwrap_err();
        let plugin_dir = world.paths.pod_dir(&uid).join("volumes/kubernetes.io~nfs");
        let began =
            error.message.starts_with("MountVolume.SetUp failed for volume \"pv\" : mount failed: exit status ");
        assert!(began, "{error}");
        let command = format!(
            "Mounting command: mount\nMounting arguments: -t nfs -o port=1,proto=tcp,retry=0,ro,timeo=10 127.0.0.1:/exported-by-nobody {}/pv\nOutput: ",
            plugin_dir.display()
        );
        assert!(error.message.contains(&command), "{error}");
        assert_eq!(fs::read_dir(plugin_dir).unwrap().count(), 0);
    }

    /// For a machine with an NFS server on loopback, which exports the directory that `RUBELET_TEST_NFS` names.
    /// Its packets are dropped by iptables for a while.
    #[tokio::test]
    #[ignore = "needs an NFS server and iptables: run it in the emulated machine"]
    async fn dead_nfs_server_is_unmounted_by_force() {
        let share = std::env::var("RUBELET_TEST_NFS").expect("RUBELET_TEST_NFS names an exported directory");
        let rule = ["INPUT", "-p", "tcp", "--dport", "2049", "-j", "DROP", "-w"];
        let iptables = |action: &str| {
            let done = std::process::Command::new("iptables").arg(action).args(rule).status().unwrap();
            assert!(done.success());
        };
        let dir = tempfile::tempdir().unwrap();
        let world = World { host: std::sync::Arc::new(LinuxHost::new(Lanes::for_pods())), ..world_in(dir.path()) };
        let volume = NfsVolume {
            server: "127.0.0.1".to_owned(),
            path: share.clone(),
            mount_options: vec!["noatime".to_owned()],
        };
        let kind = PersistentKind::Nfs(volume);
        let source = PersistentSource {
            name: "pv".to_owned(),
            read_only: false,
            is_exclusive: false,
            kind,
            size: None,
            group: None,
        };
        let uid = PodUid::new("0001");
        let place = world.paths.pod_dir(&uid).join("volumes/kubernetes.io~nfs/pv");
        let pod = serde_json::from_value(json!({"metadata": {}, "spec": {"containers": []}})).unwrap();
        let began = tokio::time::Instant::now();
        let show = |what: &str| println!("{:5.1} s {what}", began.elapsed().as_secs_f64());
        for _ in 0..2 {
            make_pod_dirs(&world, &pod_ref("0001")).await.unwrap();
            for _ in 0..2 {
                set_up_volume(&world, &pod, &uid, "data", Some(&source)).await.unwrap();
            }
            show("mounted");
            fs::write(place.join("file"), "written").unwrap();
            assert_eq!(fs::read_to_string(std::path::Path::new(&share).join("file")).unwrap(), "written");
            tear_down_volumes(&world, &pod_ref("0001")).await.unwrap();
            show("unmounted");
            assert!(!place.exists());
        }
        make_pod_dirs(&world, &pod_ref("0001")).await.unwrap();
        set_up_volume(&world, &pod, &uid, "data", Some(&source)).await.unwrap();
        iptables("-I");
        show("the server is dead");
        // A look at it is late, and holds up nothing else.
        let late = world.host.list_dir(&place).await.unwrap_err();
        show(&format!("a look: {late}"));
        let others = tokio::time::Instant::now();
        make_pod_dirs(&world, &pod_ref("0002")).await.unwrap();
        assert!(others.elapsed() < std::time::Duration::from_secs(5));
        let mut attempts = 0;
        while let Err(error) = tear_down_volumes(&world, &pod_ref("0001")).await {
            show(&format!("tear down: {error}"));
            attempts += 1;
            if attempts == 3 {
                iptables("-D");
                show("the server is back");
            }
            assert!(attempts < 30, "{error}");
            tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        }
        show("cleaned up");
        if attempts < 3 {
            iptables("-D");
        }
        assert!(!place.exists());
    }
}
