//! One pass over the kernel's files.
//!
//! Owns: which files are read for a sample, in which order. Blocking: it runs on its own thread. Never: waits, calls the runtime.
//! Upstream: cAdvisor's housekeeping of one container.

use std::path::Path;

use rubelet_host::stats::{
    Reader,
    cgroup::{self, CgroupStats, Trees},
    partition::{self, Partition},
    process::{self, Interface},
};

use super::{
    rates::Reading,
    sample::{ContainerSample, Extent, Measured, NamedCgroups, PodSample, Processes},
    targets::{ContainerTarget, PodTarget, Targets, cgroup_of},
};

/// The result of a pass.
#[derive(Debug)]
pub(super) struct Found {
    pub machine: process::Machine,
    pub topology: process::Topology,
    pub partitions: Vec<Partition>,
    pub root: Option<Measured>,
    pub interfaces: Vec<Interface>,
    pub system: Vec<(&'static str, Measured)>,
    pub tiers: Vec<Measured>,
    pub pods: Vec<PodSample>,
}

/// A shared read buffer, and the parameters of the pass.
pub(super) struct Pass<'a> {
    pub trees: &'a Trees,
    pub named: &'a NamedCgroups,
    pub extent: Extent,
    pub reader: Reader,
}

impl Pass<'_> {
    pub(super) fn run(&mut self, targets: Targets, root_dir: &Path) -> Found {
        let interfaces = if self.extent >= Extent::Summary { process::interfaces(1, &mut self.reader) } else { None };
        Found {
            machine: process::machine(&mut self.reader),
            topology: self.topology(),
            partitions: self.partitions(root_dir),
            root: self.measure("/", cgroup::Extent::All),
            interfaces: interfaces.unwrap_or_default(),
            system: self.system(&targets),
            tiers: if self.extent == Extent::Everything {
                targets.tiers.iter().filter_map(|tier| self.measure(tier, cgroup::Extent::All)).collect()
            } else {
                Vec::new()
            },
            pods: targets.pods.into_iter().map(|pod| self.pod(pod)).collect(),
        }
    }

    fn topology(&mut self) -> process::Topology {
        match self.extent {
            Extent::Usage | Extent::Summary => process::Topology::default(),
            Extent::Everything => process::topology(Path::new("/sys/devices/system/cpu"), &mut self.reader),
        }
    }

    fn partitions(&mut self, root_dir: &Path) -> Vec<Partition> {
        match self.extent {
            Extent::Usage | Extent::Summary => Vec::new(),
            Extent::Everything => partition::partitions(root_dir, &mut self.reader).unwrap_or_default(),
        }
    }

    /// Only CPU times, for a rate.
    pub(super) fn reading(&mut self, targets: &Targets) -> Reading {
        let mut cgroups = vec!["/".to_owned()];
        cgroups.extend(self.system_cgroups(targets).into_iter().map(|(_, cgroup)| cgroup));
        for pod in &targets.pods {
            for cgroup in &pod.cgroups {
                let children = self.trees.children(cgroup);
                let own = pod.containers.iter().filter_map(|container| cgroup_of(&container.id, &children));
                cgroups.extend(own.map(|child| format!("{cgroup}/{child}")));
                cgroups.push(cgroup.clone());
            }
        }
        let read = |cgroup: String| Some((cgroup.clone(), self.trees.cpu_nanos(&cgroup, &mut self.reader)?));
        Reading { nanos: cgroups.into_iter().filter_map(read).collect(), ..Reading::default() }
    }

    fn measure(&mut self, cgroup: &str, extent: cgroup::Extent) -> Option<Measured> {
        let stats = self.trees.read(cgroup, extent, &mut self.reader)?;
        Some(Measured { cgroup: cgroup.to_owned(), stats, nano_cores: None })
    }

    fn system(&mut self, targets: &Targets) -> Vec<(&'static str, Measured)> {
        let named = self.system_cgroups(targets);
        named
            .into_iter()
            .filter_map(|(name, cgroup)| Some((name, self.measure(&cgroup, cgroup::Extent::All)?)))
            .collect()
    }

    fn system_cgroups(&mut self, targets: &Targets) -> Vec<(&'static str, String)> {
        let table = process::cgroups_of_self(&mut self.reader);
        let own = table.and_then(|table| self.trees.of_process(&table)).unwrap_or_default();
        let pods = targets.tiers.first().cloned().unwrap_or_default();
        let named = self.named;
        let all =
            [("kubelet", own), ("runtime", named.runtime.clone()), ("misc", named.system.clone()), ("pods", pods)];
        all.into_iter().filter(|(_, cgroup)| !cgroup.is_empty()).collect()
    }

    fn pod(&mut self, target: PodTarget) -> PodSample {
        let extent = self.extent.of_cgroups();
        let own = target.cgroups.iter().find_map(|cgroup| self.measure(cgroup, extent));
        let parent = own.as_ref().map(|own| own.cgroup.clone()).unwrap_or_default();
        let children = self.trees.children(&parent);
        let mut sandbox = None;
        let mut interfaces = None;
        if self.extent >= Extent::Summary
            && let Some(child) = cgroup_of(&target.sandbox_id, &children)
        {
            let cgroup = format!("{parent}/{child}");
            let pids = self.trees.processes(&cgroup, &mut self.reader);
            interfaces = pids.first().and_then(|pid| process::interfaces(*pid, &mut self.reader));
            if self.extent == Extent::Everything {
                sandbox = self.container(&cgroup).map(|(measured, processes)| ContainerSample {
                    target: ContainerTarget {
                        name: String::new(),
                        id: target.sandbox_id.clone(),
                        image: target.sandbox_image.clone(),
                        created: target.created,
                    },
                    measured,
                    processes,
                });
            }
        }
        let mut containers = Vec::with_capacity(target.containers.len());
        for container in &target.containers {
            // A process that ended meanwhile is skipped.
            let Some(child) = cgroup_of(&container.id, &children) else { continue };
            let Some((measured, processes)) = self.container(&format!("{parent}/{child}")) else { continue };
            containers.push(ContainerSample { target: container.clone(), measured, processes });
        }
        PodSample { own, sandbox, containers, interfaces: interfaces.unwrap_or_default(), target }
    }

    fn container(&mut self, cgroup: &str) -> Option<(Measured, Processes)> {
        let measured = self.measure(cgroup, self.extent.of_cgroups())?;
        let mut processes = Processes::default();
        if self.extent >= Extent::Summary {
            let pids = self.trees.processes(cgroup, &mut self.reader);
            processes.count = pids.len() as u64;
            if self.extent == Extent::Everything {
                processes.open = process::open_files(&pids);
                // The oldest process is the container's first.
                let first = pids.iter().min();
                processes.open_files_limit = first.and_then(|pid| process::open_files_limit(*pid, &mut self.reader));
            }
        }
        Some((measured, processes))
    }
}

/// Every measured cgroup.
pub(super) fn all_measured(found: &mut Found) -> impl Iterator<Item = &mut Measured> {
    let pods = found.pods.iter_mut().flat_map(|pod| {
        let containers = pod.containers.iter_mut().chain(&mut pod.sandbox);
        pod.own.iter_mut().chain(containers.map(|container| &mut container.measured))
    });
    let system = found.system.iter_mut().map(|(_, measured)| measured);
    found.root.iter_mut().chain(system).chain(&mut found.tiers).chain(pods)
}

/// Nothing was readable: the node's cgroups are unavailable.
pub(super) fn is_blind(found: &Found) -> bool {
    let has_figures = |stats: &CgroupStats| stats.cpu.is_some() || stats.memory.is_some();
    !found.root.as_ref().is_some_and(|root| has_figures(&root.stats))
}
