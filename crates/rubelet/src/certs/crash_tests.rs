//! Certificates survive an agent that is killed before any of its file operations.
//!
//! Owns: a host that stops at a given operation, and the starts after it.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use rcgen::KeyPair;
use rubelet_core::cgroups::{Cgroup, UnsetLimit};
use rubelet_host::{
    linux::LinuxHost,
    port::{
        CheckError, DirEntry, FetchRequest, FetchResponse, FileIdentity, FileKind, GrpcCheck, GrpcFailure, Host,
        HttpCheck, MountPoint, NodeFigures, PodFigures, Program, ProgramOutput, Projected, Projection, ReadError,
        SharedFiles, Sharing, TcpCheck, VolumeFigures, WalkProgress,
    },
    stats::disk::{FileSystem, Usage},
    watch::Hints,
};
use rubelet_kube::kubeconfig::Kubeconfig;
use serde_json::json;
use tokio::sync::Notify;

use super::{
    CertificateTemplate, bootstrap, pending_key, serving,
    store::Store,
    test_authority::{Signer, Validity, authority, start},
};

/// Stops its caller for good before the change after `left` others, and leaves of a write what a kill leaves.
struct KilledHost {
    disk: LinuxHost,
    left: AtomicUsize,
    killed: Notify,
}

impl KilledHost {
    fn after(changes: usize) -> Arc<Self> {
        let (left, killed) = (AtomicUsize::new(changes), Notify::new());
        Arc::new(KilledHost { disk: LinuxHost::default(), left, killed })
    }

    async fn before_change(&self, path: &Path) {
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_err() {
            let _ = fs::write(path.with_file_name(".rubelet-1-0.tmp"), "half of");
            self.killed.notify_one();
            std::future::pending().await
        }
    }
}

/// `None` if it was killed.
async fn until_killed<T>(host: &KilledHost, run: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        // A run that ended was not killed; a killed one never ends.
        done = run => Some(done),
        () = host.killed.notified() => None,
    }
}

macro_rules! killed_host {
    (
        changes { $($change:ident($path:ident: &Path $(, $extra:ident: $type:ty)*) -> $changed:ty;)* }
        looks { $($look:ident($($arg:ident: $of:ty),*) -> $answer:ty;)* }
    ) => {
        #[async_trait]
        impl Host for KilledHost {
            $(async fn $change(&self, $path: &Path $(, $extra: $type)*) -> $changed {
                self.before_change($path).await;
                self.disk.$change($path $(, $extra)*).await
            })*
            $(async fn $look(&self $(, $arg: $of)*) -> $answer {
                self.disk.$look($($arg),*).await
            })*
        }
    };
}

killed_host! {
    changes {
        make_dir(path: &Path, mode: u32) -> io::Result<()>;
        make_dir_beneath(root: &Path, path: &Path, mode: u32) -> io::Result<()>;
        make_file_beneath(root: &Path, path: &Path, mode: u32) -> io::Result<()>;
        write_file_beneath(root: &Path, path: &Path, content: &[u8], mode: u32) -> io::Result<()>;
        remove_file_beneath(root: &Path, path: &Path) -> io::Result<()>;
        rename_beneath(root: &Path, path: &Path, name: &str) -> io::Result<()>;
        compress_beneath(root: &Path, path: &Path) -> io::Result<()>;
        share_dir(path: &Path, group: u32) -> io::Result<()>;
        share_tree(path: &Path, sharing: Sharing, done: &SharedFiles) -> io::Result<()>;
        make_file(path: &Path, mode: u32) -> io::Result<()>;
        write_file(path: &Path, content: &[u8], mode: u32) -> io::Result<()>;
        write_durably(path: &Path, content: &[u8], mode: u32) -> io::Result<()>;
        sync_dir(path: &Path) -> io::Result<()>;
        make_link(target: &Path, link: &Path) -> io::Result<()>;
        project(dir: &Path, projection: Projection) -> io::Result<Projected>;
        remove_file(path: &Path) -> io::Result<()>;
        remove_dir(path: &Path, own: &'static [&'static str]) -> io::Result<()>;
        remove_tree(path: &Path) -> io::Result<()>;
        mount_tmpfs(path: &Path, size_bytes: Option<u64>, mode: u32) -> io::Result<()>;
        mount_huge_pages(path: &Path, page_bytes: u64) -> io::Result<()>;
        bind_sub_path(volume: &Path, sub_path: &Path, target: &Path) -> io::Result<()>;
        release_loop_devices(file: &Path) -> io::Result<()>;
        unmount(path: &Path) -> io::Result<()>;
        remove_cgroup(path: &Path) -> io::Result<()>;
    }
    looks {
        list_dir(path: &Path) -> io::Result<Vec<DirEntry>>;
        read_file(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;
        read_in_root(root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;
        read_tail(root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;
        file_kind(path: &Path) -> io::Result<Option<FileKind>>;
        file_identity(path: &Path) -> io::Result<Option<FileIdentity>>;
        file_group(path: &Path) -> io::Result<u32>;
        file_system(path: &Path) -> io::Result<FileSystem>;
        node_figures(kubepods: Option<&Path>) -> io::Result<NodeFigures>;
        pod_figures(cgroup: &Path) -> io::Result<Option<PodFigures>>;
        volume_figures(path: &Path, progress: &WalkProgress) -> io::Result<VolumeFigures>;
        files_usage(path: &Path) -> io::Result<Usage>;
        sizes_and_watch(root: &Path, paths: Vec<PathBuf>) -> io::Result<BTreeMap<PathBuf, Option<u64>>>;
        next_writes() -> Vec<PathBuf>;
        file_system_answered() -> ();
        read_link(path: &Path) -> io::Result<Option<PathBuf>>;
        mounts_below(path: &Path) -> io::Result<Vec<PathBuf>>;
        mount_points() -> io::Result<Vec<MountPoint>>;
        write_control(path: &Path, content: &[u8], timeout: Duration) -> io::Result<()>;
        run_program(program: &Program) -> io::Result<ProgramOutput>;
        apply_cgroup(cgroup: &Cgroup) -> io::Result<Vec<UnsetLimit>>;
        list_cgroups(path: &Path) -> io::Result<Vec<String>>;
        has_cgroup(path: &Path) -> io::Result<bool>;
        watch_dir(path: &Path) -> io::Result<Hints>;
        check_http(check: &HttpCheck) -> Result<FetchResponse, CheckError>;
        check_tcp(check: &TcpCheck) -> io::Result<()>;
        check_grpc(check: &GrpcCheck) -> Result<(), GrpcFailure>;
        fetch(request: &FetchRequest) -> io::Result<FetchResponse>;
    }
}

#[tokio::test]
async fn a_bootstrap_killed_at_any_change_is_resumed_with_its_key() {
    let mut kills = 0;
    for changes in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let bootstrap = bootstrap::tests::bootstrap(dir.path());
        fs::write(&bootstrap.bootstrap_kubeconfig, bootstrap::tests::kubeconfig(&json!({ "token": "t" }))).unwrap();
        let kubeconfig = Kubeconfig::read(&bootstrap.bootstrap_kubeconfig).unwrap();
        let signer = Signer::new(bootstrap.clock.clone(), CertificateTemplate::client("n1"), 3600);
        let host = KilledHost::after(changes);
        let killed = bootstrap::Bootstrap { host: host.clone(), ..bootstrap.clone() };
        let is_finished = until_killed(&host, killed.join(signer.as_ref(), &kubeconfig)).await.is_some();
        let has_asked = !signer.asked_at.lock().unwrap().is_empty();
        let has_key = pending_key::path(&bootstrap.cert_dir).exists();
        // The token of a bootstrap may have ended by the next start: then the key is the only way to the certificate.
        assert!(!has_asked || has_key || bootstrap.is_done().await.is_ok(), "killed after {changes} changes");
        if bootstrap.is_done().await.is_err() {
            bootstrap.join(signer.as_ref(), &kubeconfig).await.unwrap();
        }
        assert_eq!(bootstrap.is_done().await, Ok(()), "killed after {changes} changes");
        if is_finished {
            assert!(!has_key);
            break;
        }
        kills += 1;
    }
    // The directory, the key, the pair, its link and their directory, the kubeconfig, the removal of the key.
    assert_eq!(kills, 7);
}

#[tokio::test]
async fn a_renewal_killed_at_any_change_leaves_a_whole_pair() {
    let mut kills = 0;
    for changes in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let whole = Store::new(Arc::new(LinuxHost::default()), dir.path(), "kubelet-client");
        let mut leaves = Vec::new();
        let host = KilledHost::after(changes);
        let mut is_finished = false;
        for hours in 0..2 {
            let now = start() + Duration::from_secs(hours * 3600);
            let key = KeyPair::generate().unwrap();
            let pair =
                authority().certificate(&CertificateTemplate::client("n1"), &key, Validity::secs_from(now, 7200));
            let key = key.serialize_pem();
            if hours == 0 {
                leaves.push(whole.update(&pair, &key, now).await.unwrap());
            } else {
                let store = Store::new(host.clone(), dir.path(), "kubelet-client");
                is_finished = until_killed(&host, store.update(&pair, &key, now)).await.is_some();
                let found = whole.current().await.unwrap().unwrap();
                assert_eq!(found.not_before == leaves[0].not_before, changes < 2, "killed after {changes} changes");
                // The renewal of the next start.
                let renewed = whole.update(&pair, &key, now).await.unwrap();
                assert_eq!(whole.current().await.unwrap(), Some(renewed));
            }
        }
        if is_finished {
            break;
        }
        kills += 1;
    }
    assert_eq!(kills, 3);
}

#[tokio::test]
async fn a_self_signed_pair_killed_at_any_change_is_made_again() {
    let mut kills = 0;
    let damages: [fn(&serving::Files); 3] = [
        |files| [&files.certificate, &files.key].into_iter().for_each(|path| fs::remove_file(path).unwrap()),
        |files| fs::remove_file(&files.key).unwrap(),
        |files| fs::write(&files.key, KeyPair::generate().unwrap().serialize_pem()).unwrap(),
    ];
    for damage in damages {
        for changes in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let disk = LinuxHost::default();
            let make = |host| serving::self_signed(host, dir.path(), "n1", &[], start());
            make(&disk).await.unwrap();
            damage(&serving::Files::of_our_own(dir.path()));
            let host = KilledHost::after(changes);
            let is_finished = until_killed(&host, make(host.as_ref())).await.is_some();
            make(&disk).await.unwrap();
            serving::Files::of_our_own(dir.path()).check(&disk).await.unwrap();
            if is_finished {
                break;
            }
            kills += 1;
        }
    }
    assert_eq!(kills, 6);
}

#[tokio::test]
async fn a_pair_of_the_operator_is_never_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let disk = LinuxHost::default();
    let make = || serving::self_signed(&disk, dir.path(), "n1", &[], start());
    make().await.unwrap();
    let (key, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let operators = authority().certificate(&CertificateTemplate::client("n1"), &key, Validity::hours(1));
    let files = serving::Files::of_our_own(dir.path());
    fs::write(&files.certificate, &operators).unwrap();
    fs::write(&files.key, other.serialize_pem()).unwrap();
    make().await.unwrap_err();
    fs::remove_file(&files.key).unwrap();
    make().await.unwrap_err();
    assert_eq!(fs::read_to_string(&files.certificate).unwrap(), operators);
}
