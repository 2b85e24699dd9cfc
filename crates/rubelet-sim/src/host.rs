//! The Host port over the simulated disk and web.

use std::{
    collections::BTreeMap,
    future::pending,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use rubelet_core::cgroups::{Cgroup, UnsetLimit};
use rubelet_host::{
    lanes::{DeviceLate, LATE_AFTER},
    port::{
        CheckError, DirEntry, Ended, FetchRequest, FetchResponse, FileIdentity, FileKind, GrpcCheck, GrpcFailure, Host,
        HttpCheck, MountPoint, NodeFigures, PodFigures, Program, ProgramOutput, Projected, Projection, ReadError,
        SharedFiles, Sharing, TcpCheck, VolumeFigures, WalkProgress,
    },
    stats::disk::{FileSystem, Usage},
    watch::Hints,
};
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};

use crate::{
    devices::{self, Place},
    disk::Node,
    faults::HostCall,
    invariants::trouble::{Faulty, Touched},
    play::MANIFESTS,
    runtime::store::{IMAGE_FS, IMAGE_FS_BYTES},
    script::Page,
    simulation::{Incarnation, SimState, Simulation},
};

/// The host as one process of the agent sees it.
#[derive(Debug)]
pub(crate) struct FakeHost {
    simulation: Arc<Simulation>,
    incarnation: Incarnation,
    files: Files,
}

/// Whose files the calls are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Files {
    /// Each device has a lane.
    Pods,
    /// The agent's own, which wait for no lane.
    Own,
}

impl FakeHost {
    pub(crate) fn new(simulation: Arc<Simulation>, incarnation: Incarnation, files: Files) -> Self {
        FakeHost { simulation, incarnation, files }
    }

    async fn look<T, E: From<io::Error>>(
        &self,
        path: &Path,
        view: impl FnOnce(&mut SimState) -> Result<T, E>,
    ) -> Result<T, E> {
        let place = self.place(path)?;
        if let Place::Hung(point) = &place {
            self.wait_for(point, |_| ()).await?;
        }
        let mut course = self.simulation.with(|sim| sim.faults.host_course(&mut sim.rng, HostCall::Look));
        // As upstream, the agent treats an unreadable manifest as removed.
        course.error.take_if(|_| path.starts_with(MANIFESTS));
        let _trouble = course.is_faulty().then(|| Faulty::enter(&self.simulation, touched_by(path)));
        self.take(course.before).await;
        if let Some(error) = course.error {
            return Err(error.into());
        }
        let answer = self.simulation.with(view);
        self.take(course.after).await;
        answer
    }

    /// A network request, which no disk delays.
    async fn ask<T>(&self, view: impl FnOnce(&mut SimState) -> T) -> T {
        self.take(self.simulation.with(|sim| Duration::from_micros(sim.rng.u64(0..500)))).await;
        self.simulation.with(view)
    }

    /// Time passes; a caller that died meanwhile stops here.
    async fn take(&self, time: Duration) {
        sleep(time).await;
        if !self.simulation.look(|sim| sim.is_alive(self.incarnation)) {
            pending().await
        }
    }

    fn place(&self, path: &Path) -> io::Result<Place> {
        if self.files == Files::Own || self.simulation.look(|sim| sim.devices.all_answer()) {
            return Ok(Place::Free);
        }
        self.simulation.with(|sim| {
            let place = sim.enter_lane(path, &self.simulation);
            place.map_err(|late| sim.log_late(path, late))
        })
    }

    /// The work is done when the device returns; the caller gives up before that if the device is late.
    async fn wait_for(&self, point: &Path, work: impl FnOnce(&mut SimState) + Send + 'static) -> io::Result<()> {
        let (done, is_done) = oneshot::channel();
        let incarnation = self.incarnation;
        let work = move |sim: &mut SimState| {
            if sim.is_alive(incarnation) {
                work(sim);
                // A caller that gave up does not receive it.
                let _ = done.send(());
            }
        };
        self.simulation.with(|sim| sim.devices.wait(point.to_owned(), sim.now, Box::new(work)));
        let answered = timeout(LATE_AFTER, is_done).await;
        self.take(Duration::ZERO).await;
        match answered {
            Ok(_) => Ok(()),
            Err(_) => Err(self.simulation.with(|sim| sim.log_late(point, devices::late(point)))),
        }
    }

    /// A change of the disk: a trace line, and before and after it a chance to die.
    async fn change<T: Send + 'static>(
        &self,
        verb: &str,
        path: &Path,
        act: impl FnOnce(&mut SimState, &Path) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        self.change_through(path, verb, path, act).await
    }

    /// A change that first looks at another file.
    async fn change_through<T: Send + 'static>(
        &self,
        first: &Path,
        verb: &str,
        path: &Path,
        act: impl FnOnce(&mut SimState, &Path) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let place = self.place(first)?;
        let course = self.simulation.with(|sim| {
            sim.may_kill_agent(self.incarnation);
            sim.faults.host_course(&mut sim.rng, HostCall::Change)
        });
        let _trouble = course.is_faulty().then(|| Faulty::enter(&self.simulation, touched_by(path)));
        let (answers, answer) = oneshot::channel();
        let (incarnation, verb, path) = (self.incarnation, verb.to_owned(), path.to_owned());
        let work = move |sim: &mut SimState| {
            let answer = match course.error {
                Some(error) => Err(error),
                None => act(sim, &path),
            };
            match &answer {
                Ok(_) => sim.log("disk", format!("{verb} {}", path.display())),
                Err(error) => sim.log("disk", format!("{verb} {}: {error}", path.display())),
            }
            sim.may_kill_agent(incarnation);
            // A caller that gave up does not receive it.
            let _ = answers.send(answer);
        };
        match &place {
            Place::Hung(point) => self.wait_for(point, work).await?,
            Place::Free | Place::Trial { .. } => {
                self.take(course.before).await;
                self.simulation.with(work);
            }
        }
        self.take(course.after).await;
        answer.await.expect("the work was done")
    }
}

impl SimState {
    /// A hint may be lost, as those of directories.
    fn take_writes(&mut self) -> Vec<PathBuf> {
        let written = self.disk.take_writes();
        written.into_iter().filter(|_| !self.faults.loses_hint(&mut self.rng)).collect()
    }

    fn log_late(&mut self, path: &Path, late: DeviceLate) -> io::Error {
        self.log("disk", format!("{}: {late}", path.display()));
        late.into()
    }
}

/// The pod whose directory, logs or cgroup this is; the node if it is no pod's.
fn touched_by(path: &Path) -> Touched {
    let mut parts = path.iter().filter_map(|part| part.to_str());
    let uid = parts.find_map(|part| part.strip_prefix("pod")).and_then(|rest| match rest {
        // Log directories end in the uid.
        "s" => parts.next().and_then(|name| name.rsplit('_').next()),
        uid => Some(uid),
    });
    Touched::pod(uid.map(str::to_owned))
}

#[async_trait]
impl Host for FakeHost {
    async fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        self.look(path, |sim| sim.disk.list_dir(path)).await
    }

    async fn read_file(&self, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        self.look(path, |sim| match sim.disk.node(path)? {
            None => Err(ReadError::Io(io::ErrorKind::NotFound.into())),
            Some(Node::File { content, .. }) if content.len() as u64 > limit_bytes => {
                Err(ReadError::TooLarge { limit_bytes })
            }
            Some(Node::File { content, .. }) => Ok(content.clone()),
            Some(other) => Err(ReadError::NotRegular(other.kind())),
        })
        .await
    }

    /// Volumes have no links here.
    async fn read_in_root(&self, root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        let below = path.strip_prefix("/").unwrap_or(path);
        self.read_file(&root.join(below), limit_bytes).await
    }

    async fn read_tail(&self, _root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        self.look(path, |sim| match sim.disk.node(path)? {
            None => Err(ReadError::Io(io::ErrorKind::NotFound.into())),
            Some(Node::File { content, .. }) => {
                let length = usize::try_from(limit_bytes).unwrap_or(usize::MAX).min(content.len());
                Ok(content[content.len() - length..].to_vec())
            }
            Some(other) => Err(ReadError::NotRegular(other.kind())),
        })
        .await
    }

    async fn file_kind(&self, path: &Path) -> io::Result<Option<FileKind>> {
        self.look(path, |sim| Ok(sim.disk.node(path)?.map(Node::kind))).await
    }

    async fn file_identity(&self, path: &Path) -> io::Result<Option<FileIdentity>> {
        self.look(path, |sim| sim.disk.identity(path)).await
    }

    /// Owners are not simulated.
    async fn file_group(&self, path: &Path) -> io::Result<u32> {
        self.look(path, |sim| sim.disk.node(path).map(|_| 0)).await
    }

    /// Images have one of their own, which few of them fill.
    async fn file_system(&self, path: &Path) -> io::Result<FileSystem> {
        self.look(path, |sim| {
            if path == Path::new(IMAGE_FS) {
                let (capacity_bytes, available_bytes) = (IMAGE_FS_BYTES, sim.runtime.image_fs_available());
                sim.rules.image_fs_measured(sim.now, available_bytes);
                return Ok(FileSystem { device: 2, capacity_bytes, available_bytes, ..FileSystem::default() });
            }
            let (capacity_bytes, available_bytes) = (1 << 37, 1 << 36);
            let found = FileSystem { device: 1, capacity_bytes, available_bytes, ..FileSystem::default() };
            sim.disk.list_dir(path).map(|_| found)
        })
        .await
    }

    async fn node_figures(&self, _kubepods: Option<&Path>) -> io::Result<NodeFigures> {
        self.look(Path::new("/sys"), |sim| {
            sim.rules.memory_measured(sim.now, sim.memory.available(&sim.runtime.picture));
            Ok(sim.memory.node(&sim.runtime.picture))
        })
        .await
    }

    async fn pod_figures(&self, cgroup: &Path) -> io::Result<Option<PodFigures>> {
        self.look(cgroup, |sim| {
            let name = cgroup.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let uid = name.strip_prefix("pod").unwrap_or_default();
            let is_there = sim.cgroups.contains(cgroup);
            let figures = is_there.then(|| sim.memory.pod(uid, &sim.runtime.picture));
            if let Some(figures) = &figures {
                sim.rules.pod_measured(uid, figures.working_set_bytes);
            }
            Ok(figures)
        })
        .await
    }

    async fn volume_figures(&self, path: &Path, _: &WalkProgress) -> io::Result<VolumeFigures> {
        self.look(path, |sim| {
            let is_mount = sim.disk.mounts_below(path)?.iter().any(|point| point == path);
            let used = sim.disk.usage(path)?;
            if let (Touched::Pod(uid), true) = (touched_by(path), path.ends_with("scratch")) {
                sim.rules.volume_measured(&uid, used.bytes);
            }
            Ok(VolumeFigures { used, is_mount, ..VolumeFigures::default() })
        })
        .await
    }

    async fn files_usage(&self, path: &Path) -> io::Result<Usage> {
        self.look(path, |sim| {
            let files = sim.disk.list_dir(path)?.into_iter().map(|entry| path.join(entry.name));
            let nodes = files.filter_map(|file| sim.disk.node(&file).ok().flatten());
            let sizes = nodes.filter_map(|node| match node {
                Node::File { content, .. } => Some(Usage { bytes: content.len() as u64, inodes: 1 }),
                _ => None,
            });
            Ok(sizes.fold(Usage::default(), Usage::saturating_add))
        })
        .await
    }

    async fn make_dir(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.change("mkdir", path, move |sim, path| sim.disk.make_dir(path, mode)).await
    }

    // No pod of the simulation makes links.
    async fn make_dir_beneath(&self, _root: &Path, path: &Path, mode: u32) -> io::Result<()> {
        self.make_dir(path, mode).await
    }

    async fn make_file_beneath(&self, _root: &Path, path: &Path, mode: u32) -> io::Result<()> {
        self.make_file(path, mode).await
    }

    async fn write_file_beneath(&self, _root: &Path, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.write_file(path, content, mode).await
    }

    async fn remove_file_beneath(&self, _root: &Path, path: &Path) -> io::Result<()> {
        self.remove_file(path).await
    }

    async fn sizes_and_watch(&self, root: &Path, paths: Vec<PathBuf>) -> io::Result<BTreeMap<PathBuf, Option<u64>>> {
        self.look(root, |sim| {
            sim.print_lines();
            sim.disk.watch_writes(&paths);
            let size = |path: &Path| match sim.disk.node(path) {
                Ok(None) => Some(None),
                Ok(Some(Node::File { content, .. })) => Some(Some(content.len() as u64)),
                Ok(Some(_)) | Err(_) => None,
            };
            Ok(paths.into_iter().filter_map(|path| size(&path).map(|size| (path, size))).collect())
        })
        .await
    }

    async fn next_writes(&self) -> Vec<PathBuf> {
        loop {
            // Registered before the read, so that a write in between is not missed.
            let written = self.simulation.written.notified();
            self.take(Duration::ZERO).await;
            if self.simulation.look(|sim| sim.disk.has_writes()) {
                return self.simulation.with(SimState::take_writes);
            }
            written.await;
        }
    }

    async fn file_system_answered(&self) {
        let answered = self.simulation.look(|sim| sim.devices.answered.clone());
        answered.notified().await;
        self.take(Duration::ZERO).await;
    }

    async fn rename_beneath(&self, _root: &Path, path: &Path, name: &str) -> io::Result<()> {
        let to = path.with_file_name(name);
        self.change(&format!("rename to {name}"), path, move |sim, path| sim.rename_log(path, &to)).await
    }

    /// The simulated form is the same text.
    async fn compress_beneath(&self, _root: &Path, path: &Path) -> io::Result<()> {
        let mut to = path.as_os_str().to_owned();
        to.push(".gz");
        self.change("compress", path, move |sim, path| sim.compress_log(path, Path::new(&to))).await
    }

    async fn share_dir(&self, path: &Path, group: u32) -> io::Result<()> {
        self.change(&format!("chgrp {group}"), path, |sim, path| sim.disk.list_dir(path).map(drop)).await
    }

    async fn share_tree(&self, path: &Path, sharing: Sharing, _done: &SharedFiles) -> io::Result<()> {
        self.change(&format!("chgrp -R {}", sharing.group), path, |sim, path| sim.disk.list_dir(path).map(drop)).await
    }

    async fn make_file(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.change("touch", path, move |sim, path| match sim.disk.node(path)? {
            Some(_) => Ok(()),
            None => sim.disk.write_file(path, b"", mode),
        })
        .await
    }

    async fn write_file(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        let content = content.to_vec();
        self.change("write", path, move |sim, path| sim.disk.write_file(path, &content, mode)).await
    }

    /// A crash of the simulated disk loses nothing.
    async fn write_durably(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        self.write_file(path, content, mode).await
    }

    async fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.change("sync", path, |_, _| Ok(())).await
    }

    async fn make_link(&self, target: &Path, link: &Path) -> io::Result<()> {
        let target = target.to_owned();
        self.change("link", link, move |sim, link| sim.disk.make_link(&target, link)).await
    }

    async fn project(&self, dir: &Path, projection: Projection) -> io::Result<Projected> {
        self.change("project", dir, move |sim, dir| sim.disk.project(dir, &projection)).await
    }

    async fn read_link(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        self.look(path, |sim| sim.disk.read_link(path)).await
    }

    async fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.change("rm", path, |sim, path| sim.disk.remove_file(path)).await
    }

    async fn remove_dir(&self, path: &Path, own: &'static [&'static str]) -> io::Result<()> {
        self.change("rmdir", path, |sim, path| sim.disk.remove_dir(path, own)).await
    }

    async fn remove_tree(&self, path: &Path) -> io::Result<()> {
        self.change("rm -r", path, |sim, path| sim.disk.remove_tree(path)).await
    }

    async fn mount_tmpfs(&self, path: &Path, _size_bytes: Option<u64>, _mode: u32) -> io::Result<()> {
        self.change("mount", path, |sim, path| sim.disk.mount_tmpfs(path)).await
    }

    async fn mount_huge_pages(&self, path: &Path, _page_bytes: u64) -> io::Result<()> {
        self.change("mount", path, |sim, path| sim.disk.mount_tmpfs(path)).await
    }

    async fn bind_sub_path(&self, volume: &Path, sub_path: &Path, target: &Path) -> io::Result<()> {
        let source = volume.join(sub_path);
        self.change_through(&source.clone(), "bind", target, move |sim, target| {
            sim.disk.make_dir(&source, 0o755)?;
            sim.disk.make_dir(target, 0o750)?;
            sim.disk.bind(&source, target)
        })
        .await
    }

    async fn mounts_below(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.look(path, |sim| sim.disk.mounts_below(path)).await
    }

    /// There are none here.
    async fn release_loop_devices(&self, file: &Path) -> io::Result<()> {
        self.look(file, |_| Ok(())).await
    }

    async fn mount_points(&self) -> io::Result<Vec<MountPoint>> {
        self.look(Path::new("/proc"), |sim| Ok(sim.disk.mount_points())).await
    }

    /// Of the node's programs, the simulated one has mount.
    async fn run_program(&self, program: &Program) -> io::Result<ProgramOutput> {
        if program.name != "mount" {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.change("mount", &program.on, |sim, path| sim.disk.mount_tmpfs(path)).await?;
        Ok(ProgramOutput { status: Ended::Exit(0), stdout: String::new(), stderr: String::new() })
    }

    async fn write_control(&self, path: &Path, content: &[u8], _timeout: Duration) -> io::Result<()> {
        self.write_file(path, content, 0o200).await
    }

    async fn unmount(&self, path: &Path) -> io::Result<()> {
        self.change("umount", path, |sim, path| sim.disk.unmount(path)).await
    }

    async fn apply_cgroup(&self, cgroup: &Cgroup) -> io::Result<Vec<UnsetLimit>> {
        let path = Path::new(&cgroup.path);
        self.change("cgroup", path, |sim, path| {
            sim.cgroups.extend(path.ancestors().map(Path::to_path_buf));
            Ok(Vec::new())
        })
        .await
    }

    async fn remove_cgroup(&self, path: &Path) -> io::Result<()> {
        self.change("remove cgroup", path, |sim, path| {
            sim.rules.cgroup_removed(sim.now, path, &sim.runtime.picture);
            sim.cgroups.retain(|cgroup| !cgroup.starts_with(path));
            Ok(())
        })
        .await
    }

    async fn list_cgroups(&self, path: &Path) -> io::Result<Vec<String>> {
        self.look(path, |sim| {
            let children = sim.cgroups.iter().filter(|cgroup| cgroup.parent() == Some(path));
            Ok(children.filter_map(|cgroup| Some(cgroup.file_name()?.to_str()?.to_owned())).collect())
        })
        .await
    }

    async fn has_cgroup(&self, path: &Path) -> io::Result<bool> {
        self.look(path, |sim| Ok(sim.cgroups.contains(path))).await
    }

    async fn watch_dir(&self, path: &Path) -> io::Result<Hints> {
        self.look(path, |sim| sim.disk.watch(path)).await.map(Hints::from)
    }

    /// The path selects the container's response.
    async fn check_http(&self, check: &HttpCheck) -> Result<FetchResponse, CheckError> {
        self.ask(|_| ()).await;
        let answer = |status: u16| Ok(FetchResponse { status, body: Vec::new() });
        let path = check.url.rfind('/').map_or("", |start| &check.url[start..]);
        match path.parse().unwrap_or(Page::Ok) {
            Page::Ok => answer(200),
            Page::Fail => answer(500),
            Page::Stall => {
                self.take(check.timeout).await;
                Err(io::Error::from(io::ErrorKind::TimedOut).into())
            }
            Page::Reset => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
            Page::Half => Err(CheckError::Body("unexpected EOF".to_owned())),
        }
    }

    async fn check_tcp(&self, _check: &TcpCheck) -> io::Result<()> {
        self.ask(|_| Ok(())).await
    }

    async fn check_grpc(&self, _check: &GrpcCheck) -> Result<(), GrpcFailure> {
        self.ask(|_| Ok(())).await
    }

    async fn fetch(&self, request: &FetchRequest) -> io::Result<FetchResponse> {
        let answer = self.ask(|sim| sim.pages.get(&request.url).cloned()).await;
        match answer {
            None => Err(io::ErrorKind::ConnectionRefused.into()),
            Some(page) if page.body.len() as u64 > request.limit_bytes => Err(io::ErrorKind::FileTooLarge.into()),
            Some(page) => Ok(page),
        }
    }
}
