//! Storage of a play: CSI drivers, claims, and what is left of them.
//!
//! Owns: the methods of a play that concern storage, its predicates, and the expected final state of volumes.

use std::{collections::BTreeSet, path::Path, time::Duration};

use crate::{
    csi::{
        act::is_inline,
        attacher::Attachment,
        driver::{Device, DriverEnd, DriverScript},
        objects::{ClaimScript, volume_name},
    },
    invariants::csi::{BLOCK_VOLUMES, STAGED, is_staging, pod_of},
    play::{Play, predicates::Predicate},
    script::PodScript,
    simulation::{ScheduledEvent, SimState},
};

impl Play {
    /// Installs a driver and starts it.
    pub(crate) fn driver(&mut self, script: impl Into<DriverScript>) -> &mut Self {
        let script = script.into();
        let name = script.name.clone();
        self.installed_driver(script).start_driver(&name)
    }

    /// Installs a driver that does not run yet.
    pub(crate) fn installed_driver(&mut self, script: impl Into<DriverScript>) -> &mut Self {
        let script = script.into();
        self.change(|sim| {
            if script.has_object {
                sim.create_csi_driver(&script);
            }
            sim.install_driver(script);
        })
    }

    pub(crate) fn start_driver(&mut self, name: &str) -> &mut Self {
        self.change(|sim| sim.start_driver(name))
    }

    pub(crate) fn end_driver(&mut self, name: &str, how: DriverEnd) -> &mut Self {
        self.change(|sim| sim.end_driver(name, how))
    }

    /// The driver ends, and is back after a while.
    pub(crate) fn restart_driver(&mut self, name: &str, how: DriverEnd, after: Duration) -> &mut Self {
        self.end_driver(name, how).change(|sim| sim.schedule_in(after, ScheduledEvent::DriverReturns(name.to_owned())))
    }

    /// The driver can have so many volumes on the node from now on.
    pub(crate) fn limit_driver(&mut self, name: &str, volumes: usize) -> &mut Self {
        self.change(|sim| sim.driver(name).script.limit = Some(volumes))
    }

    pub(crate) fn claim(&mut self, script: &ClaimScript) -> &mut Self {
        self.change(|sim| sim.create_claim(script))
    }

    /// The claim's volume gets larger by its first size.
    pub(crate) fn grow_claim(&mut self, name: &str) -> &mut Self {
        self.change(|sim| sim.grow_claim(name))
    }

    pub(crate) fn bind_claim(&mut self, name: &str) -> &mut Self {
        self.change(|sim| sim.bind_claim(name))
    }
}

/// A call of this method is under way for a volume or a directory whose name contains `about`.
pub(crate) fn calling_driver(method: &'static str, about: &str) -> Predicate {
    let wanted = about.to_owned();
    Predicate::new(format!("a call of {method} about {about}"), move |sim| {
        sim.csi.calls.values().any(|(name, subject)| *name == method && subject.contains(&wanted))
    })
}

fn device_of(sim: &SimState, claim: &str) -> Device {
    sim.device_of(&volume_name(claim)).expect("the play created the claim")
}

/// The claim's volume is staged.
pub(crate) fn staged(claim: &str) -> Predicate {
    let name = claim.to_owned();
    Predicate::new(format!("{claim} staged"), move |sim| {
        let content = device_of(sim, &name).content();
        sim.disk.mounts_of(&content).any(|point| is_staging(point))
    })
}

/// The claim's volume is neither staged nor published.
pub(crate) fn unmounted(claim: &str) -> Predicate {
    let name = claim.to_owned();
    Predicate::new(format!("{claim} unmounted"), move |sim| {
        sim.disk.mounts_of(&device_of(sim, &name).content()).next().is_none()
    })
}

/// The claim's volume is published for this many pods.
pub(crate) fn published(claim: &str, pods: usize) -> Predicate {
    let name = claim.to_owned();
    Predicate::new(format!("{claim} published for {pods} pods"), move |sim| {
        let content = device_of(sim, &name).content();
        sim.disk.mounts_of(&content).filter(|point| pod_of(point).is_some()).count() == pods
    })
}

/// The driver's inline volumes are published for these pods, and each of them shows one of its own.
pub(crate) fn inline_published(driver: &str, pods: &[&str]) -> Predicate {
    let content = Device::new(driver, "").content();
    let wanted: BTreeSet<String> = pods.iter().map(ToString::to_string).collect();
    Predicate::new(format!("inline volumes of {driver} published for {pods:?}"), move |sim| {
        let shown = sim.disk.mounts_in(&content).filter(|(_, shown)| is_inline(&file_name(shown)));
        let (points, shown): (Vec<_>, Vec<_>) = shown.unzip();
        let uids: Vec<_> = points.iter().filter_map(|point| pod_of(point)).collect();
        let names: BTreeSet<String> = uids.iter().filter_map(|uid| name_of(sim, uid)).collect();
        names == wanted
            && [points.len(), uids.len()] == [wanted.len(); 2]
            && BTreeSet::from_iter(shown).len() == wanted.len()
    })
}

fn name_of(sim: &SimState, uid: &str) -> Option<String> {
    let mut pods = sim.api.of("pods").map(|(_, pod)| &pod["metadata"]);
    pods.find(|metadata| metadata["uid"] == uid).and_then(|metadata| metadata["name"].as_str()).map(str::to_owned)
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The claim's volume and its file system have this size, and the claim says nothing else.
pub(crate) fn resized(claim: &str, gibibytes: i64) -> Predicate {
    let name = claim.to_owned();
    Predicate::new(format!("{claim} with {gibibytes} GiB"), move |sim| {
        let device = device_of(sim, &name);
        let size = sim.csi.drivers[&device.driver].volumes[&device.handle];
        size.file_system == gibibytes << 30 && sim.size_complaint(&name).is_none()
    })
}

pub(crate) fn attached(claim: &str) -> Predicate {
    let name = claim.to_owned();
    Predicate::new(format!("{claim} attached"), move |sim| {
        sim.csi.attachments.get(&device_of(sim, &name)) == Some(&Attachment::Attached)
    })
}

/// The CSINode object says that the driver can have so many volumes on the node.
pub(crate) fn limit_in_csi_node(driver: &str, volumes: u64) -> Predicate {
    let name = driver.to_owned();
    Predicate::new(format!("{driver} limited to {volumes}"), move |sim| {
        let mut objects = sim.api.of("csinodes").map(|(_, object)| &object["spec"]["drivers"]);
        let mut drivers = objects.next().and_then(|drivers| drivers.as_array()).into_iter().flatten();
        drivers.any(|driver| driver["name"] == name.as_str() && driver["allocatable"]["count"] == volumes)
    })
}

/// The claim's volume is neither mounted nor attached.
pub(crate) fn unused(claim: &str) -> Predicate {
    let name = claim.to_owned();
    Predicate::new(format!("{claim} unused"), move |sim| {
        let device = device_of(sim, &name);
        sim.disk.mounts_of(&device.content()).next().is_none() && !sim.csi.attachments.contains_key(&device)
    })
}

/// What is left of volumes that none of these pods uses.
pub(super) fn leftover(sim: &SimState, wanted: &[String]) -> Option<String> {
    let used: BTreeSet<Device> =
        sim.users_of_devices().into_iter().filter(|(uid, _)| wanted.contains(uid)).map(|(_, device)| device).collect();
    if let Some((device, state)) = sim.csi.attachments.iter().find(|(device, _)| !used.contains(device)) {
        return Some(format!("{device} is {state:?}, in use: {}", sim.is_in_use(device)));
    }
    let devices =
        sim.csi.drivers.iter().flat_map(|(driver, it)| it.volumes.keys().map(|name| Device::new(driver, name)));
    for device in devices.filter(|device| !used.contains(device)) {
        if let Some(point) = sim.disk.mounts_of(&device.content()).next() {
            return Some(format!("{device} is mounted at {}", point.display()));
        }
    }
    // The driver's own directory stays.
    let staged = sim.disk.leftovers(Path::new(STAGED));
    let dirs: BTreeSet<_> = used.iter().map(Device::staging_dir).collect();
    let volumes: BTreeSet<_> = used.iter().filter_map(|device| sim.volume_of(device)).collect();
    let is_used = |path: &Path| {
        dirs.iter().any(|dir| path.starts_with(dir))
            || block_volume(path).is_some_and(|volume| volume.is_none_or(|volume| volumes.contains(volume)))
    };
    let left = staged.iter().find(|path| path.parent() != Some(Path::new(STAGED)) && !is_used(path));
    if let Some(path) = left {
        return Some(format!("{} is left of a device", path.display()));
    }
    let inline = sim.csi.drivers.keys().flat_map(|driver| sim.disk.leftovers(&Device::new(driver, "").content()));
    let mut inline = inline.filter(|path| is_inline(&file_name(path)));
    let orphan = inline.find(|path| sim.disk.mounts_of(path).next().is_none());
    orphan.map(|path| format!("{} is left of an inline volume", path.display()))
}

/// The block volume that a path is of; none if it is one for all of them. `None`: it is of none.
fn block_volume(path: &Path) -> Option<Option<&str>> {
    let mut parts = path.strip_prefix(BLOCK_VOLUMES).ok()?.iter().filter_map(|part| part.to_str());
    Some(match parts.next() {
        Some("staging" | "publish") => parts.next(),
        other => other,
    })
}

/// What is wrong with the size of a volume that the pod has.
pub(super) fn size_complaint(sim: &SimState, script: &PodScript, uid: &str) -> Option<String> {
    let is_published = |claim: &str| {
        let content = device_of(sim, claim).content();
        sim.disk.mounts_of(&content).any(|point| pod_of(point) == Some(uid))
    };
    let claims = script.claims.iter().filter(|claim| is_published(claim));
    claims.into_iter().find_map(|claim| sim.size_complaint(claim))
}

/// The pod waits for a volume for a reason that does not end by itself.
pub(super) fn waits_for_volume(sim: &SimState, script: &PodScript, uid: &str) -> bool {
    let waits_for = |claim: &String| {
        !sim.is_claim_bound(claim)
            || sim.is_taken_by_another(claim, uid)
            || !sim.can_be_attached(&device_of(sim, claim))
    };
    script.inline.as_ref().is_some_and(|driver| sim.refuses_inline(driver)) || script.claims.iter().any(waits_for)
}
