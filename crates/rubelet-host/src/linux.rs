//! The Linux node.
//!
//! Owns: `LinuxHost`, which runs every call that may block in the lane of its device. Never: blocks the caller's thread,
//! retries, decides. An abandoned call may still finish on its thread; only the long ones (removing a tree) stop early.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use rubelet_core::cgroups::{Cgroup, UnsetLimit};

use crate::{
    cgroup::{self, Hierarchies},
    check::{self, Checker},
    fetch::Fetcher,
    fs,
    lanes::{Call, Lanes, Length},
    loop_device, mount,
    port::{
        CheckError, DirEntry, FetchRequest, FetchResponse, FileIdentity, FileKind, GrpcCheck, GrpcFailure, Host,
        HttpCheck, MountPoint, NodeFigures, PodFigures, Program, ProgramOutput, Projected, Projection, ReadError,
        SharedFiles, Sharing, TcpCheck, VolumeFigures, WalkProgress,
    },
    program::Programs,
    stats::{
        Reader,
        cgroup::Trees,
        disk::{self, FileSystem, Usage},
        tree::{Slice, TreeWalk, WalkBudget},
    },
    watch::{Hints, Interest, Watches},
    write_watch::WriteWatches,
};

#[derive(Clone, Debug)]
pub struct LinuxHost {
    lanes: Lanes,
    mounter: mount::Mounter,
    programs: Programs,
    fetcher: Fetcher,
    checker: Checker,
    watches: Watches,
    trees: Arc<OnceLock<Trees>>,
    write_watches: WriteWatches,
    walk_budget: Arc<WalkBudget>,
}

impl LinuxHost {
    /// Blocking calls use the threads of `lanes`.
    pub fn new(lanes: Lanes) -> Self {
        LinuxHost {
            watches: Watches::new(Interest::Entries, lanes.clone()),
            lanes,
            mounter: mount::Mounter::default(),
            programs: Programs::default(),
            fetcher: Fetcher::default(),
            checker: Checker::default(),
            trees: Arc::default(),
            write_watches: WriteWatches::default(),
            walk_budget: Arc::default(),
        }
    }
}

/// One slice of a walk, which it begins.
fn walk_on(walk: Option<TreeWalk>, path: &Path, call: &Call) -> io::Result<Slice> {
    let walk = walk.map_or_else(|| TreeWalk::begin(path), Ok)?;
    walk.slice(&|| call.go_on())
}

/// For the agent's own files.
impl Default for LinuxHost {
    fn default() -> Self {
        LinuxHost::new(Lanes::own_files())
    }
}

#[async_trait]
impl Host for LinuxHost {
    async fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        self.short(path, fs::list_dir).await
    }

    async fn read_file(&self, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        self.short(path, move |path| fs::read_file(path, limit_bytes)).await
    }

    async fn read_in_root(&self, root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        let path = path.to_owned();
        self.short(root, move |root| fs::read_in_root(root, &path, limit_bytes)).await
    }

    async fn read_tail(&self, root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        let (root, below) = (root.to_owned(), path.to_owned());
        let at = root.join(path);
        self.short(&at, move |_| fs::read_tail(&root, &below, limit_bytes)).await
    }

    async fn file_kind(&self, path: &Path) -> io::Result<Option<FileKind>> {
        self.short(path, fs::file_kind).await
    }

    async fn file_identity(&self, path: &Path) -> io::Result<Option<FileIdentity>> {
        self.short(path, fs::file_identity).await
    }

    async fn file_group(&self, path: &Path) -> io::Result<u32> {
        self.short(path, fs::file_group).await
    }

    async fn file_system(&self, path: &Path) -> io::Result<FileSystem> {
        self.short(path, disk::file_system).await
    }

    async fn node_figures(&self, kubepods: Option<&Path>) -> io::Result<NodeFigures> {
        let kubepods = kubepods.and_then(Path::to_str).map(str::to_owned);
        self.stats(move |trees, reader| Ok(trees.node_figures(kubepods.as_deref(), reader))).await
    }

    async fn pod_figures(&self, cgroup: &Path) -> io::Result<Option<PodFigures>> {
        let path = cgroup.to_str().unwrap_or_default().to_owned();
        self.stats(move |trees, reader| Ok(trees.pod_figures(&path, reader))).await
    }

    async fn volume_figures(&self, path: &Path, progress: &WalkProgress) -> io::Result<VolumeFigures> {
        let (on, is_mount) = self.short(path, disk::volume_place).await?;
        if is_mount {
            let used = Usage { bytes: on.used_bytes, inodes: on.inodes.saturating_sub(on.inodes_free) };
            return Ok(VolumeFigures { used, on, is_mount });
        }
        let mut walk = None;
        loop {
            self.walk_budget.admit().await;
            let (known, owned) = (walk.take(), path.to_owned());
            let slice = self.lanes.run(path, Length::Long, move |call| walk_on(known, &owned, call)).await?;
            self.walk_budget.spend(slice.entries, slice.worked);
            let figures = VolumeFigures { used: slice.walk.usage(), on, is_mount };
            if slice.walk.is_finished() {
                return Ok(figures);
            }
            progress.set(figures);
            walk = Some(slice.walk);
        }
    }

    async fn files_usage(&self, path: &Path) -> io::Result<Usage> {
        self.short(path, disk::files_usage).await
    }

    async fn make_dir(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.short(path, move |path| fs::make_dir(path, mode)).await
    }

    async fn make_dir_beneath(&self, root: &Path, path: &Path, mode: u32) -> io::Result<()> {
        let (root, below) = (root.to_owned(), path.to_owned());
        let at = root.join(path);
        self.short(&at, move |_| fs::make_dir_beneath(&root, &below, mode)).await
    }

    async fn make_file_beneath(&self, root: &Path, path: &Path, mode: u32) -> io::Result<()> {
        let (root, below) = (root.to_owned(), path.to_owned());
        let at = root.join(path);
        self.short(&at, move |_| fs::make_file_beneath(&root, &below, mode)).await
    }

    async fn write_file_beneath(&self, root: &Path, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        let (root, below, content) = (root.to_owned(), path.to_owned(), content.to_owned());
        let at = root.join(path);
        self.short(&at, move |_| fs::write_file_beneath(&root, &below, &content, mode)).await
    }

    async fn remove_file_beneath(&self, root: &Path, path: &Path) -> io::Result<()> {
        let (root, below) = (root.to_owned(), path.to_owned());
        let at = root.join(path);
        self.short(&at, move |_| fs::remove_file_beneath(&root, &below)).await
    }

    async fn sizes_and_watch(&self, root: &Path, paths: Vec<PathBuf>) -> io::Result<BTreeMap<PathBuf, Option<u64>>> {
        let watches = self.write_watches.clone();
        // Without it there are no hints.
        let _ = watches.open();
        self.short(root, move |root| fs::file_sizes(root, paths, &|file, path| watches.arm(file, path))).await
    }

    async fn next_writes(&self) -> Vec<PathBuf> {
        self.write_watches.next().await
    }

    async fn file_system_answered(&self) {
        self.lanes.answered().await;
    }

    async fn rename_beneath(&self, root: &Path, path: &Path, name: &str) -> io::Result<()> {
        let (root, below, name) = (root.to_owned(), path.to_owned(), name.to_owned());
        let at = root.join(path);
        self.short(&at, move |_| fs::rename_beneath(&root, &below, &name)).await
    }

    async fn compress_beneath(&self, root: &Path, path: &Path) -> io::Result<()> {
        let (root, below) = (root.to_owned(), path.to_owned());
        let at = root.join(path);
        let work = move |call: &Call| fs::compress_beneath(&root, &below, &|| call.go_on());
        self.lanes.run(&at, Length::Long, work).await
    }

    async fn share_dir(&self, path: &Path, group: u32) -> io::Result<()> {
        self.short(path, move |path| fs::share_dir(path, group)).await
    }

    async fn share_tree(&self, path: &Path, sharing: Sharing, done: &SharedFiles) -> io::Result<()> {
        let (tree, done) = (path.to_owned(), done.clone());
        self.lanes.run(path, Length::Long, move |call| fs::share_tree(&tree, sharing, &done, &|| call.go_on())).await
    }

    async fn make_file(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.short(path, move |path| fs::make_file(path, mode)).await
    }

    async fn write_file(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        let content = content.to_owned();
        self.short(path, move |path| fs::write_file(path, &content, mode)).await
    }

    async fn write_durably(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        let (path, content) = (path.to_owned(), content.to_owned());
        blocking(move || fs::write_durably(&path, &content, mode)).await
    }

    async fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let path = path.to_owned();
        blocking(move || fs::sync_dir(&path)).await
    }

    async fn make_link(&self, target: &Path, link: &Path) -> io::Result<()> {
        let target = target.to_owned();
        self.short(link, move |link| fs::make_link(&target, link)).await
    }

    async fn project(&self, dir: &Path, projection: Projection) -> io::Result<Projected> {
        self.short(dir, move |dir| fs::project(dir, &projection)).await
    }

    async fn read_link(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        self.short(path, fs::read_link).await
    }

    async fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.short(path, fs::remove_file).await
    }

    async fn remove_dir(&self, path: &Path, own: &'static [&'static str]) -> io::Result<()> {
        self.short(path, move |path| fs::remove_dir(path, own)).await
    }

    async fn remove_tree(&self, path: &Path) -> io::Result<()> {
        let tree = path.to_owned();
        self.lanes.run(path, Length::Long, move |call| fs::remove_tree(&tree, &|| call.go_on())).await
    }

    async fn mount_tmpfs(&self, path: &Path, size_bytes: Option<u64>, mode: u32) -> io::Result<()> {
        let mounter = self.mounter.clone();
        self.short(path, move |path| mounter.mount_tmpfs(path, size_bytes, mode)).await
    }

    async fn mount_huge_pages(&self, path: &Path, page_bytes: u64) -> io::Result<()> {
        let mounter = self.mounter.clone();
        self.short(path, move |path| mounter.mount_huge_pages(path, page_bytes)).await
    }

    async fn bind_sub_path(&self, volume: &Path, sub_path: &Path, target: &Path) -> io::Result<()> {
        let mounter = self.mounter.clone();
        let source = volume.join(sub_path);
        let (volume, sub_path, target) = (volume.to_owned(), sub_path.to_owned(), target.to_owned());
        self.short(&source, move |_| mounter.bind_sub_path(&volume, &sub_path, &target)).await
    }

    async fn mounts_below(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        self.short(path, mount::mounts_below).await
    }

    async fn release_loop_devices(&self, file: &Path) -> io::Result<()> {
        self.short(file, loop_device::release).await
    }

    async fn mount_points(&self) -> io::Result<Vec<MountPoint>> {
        self.short(Path::new("/proc"), |_| mount::mount_points()).await
    }

    async fn run_program(&self, program: &Program) -> io::Result<ProgramOutput> {
        self.programs.run(program).await
    }

    async fn write_control(&self, path: &Path, content: &[u8], timeout: Duration) -> io::Result<()> {
        self.programs.write_control(path, content, timeout).await
    }

    async fn unmount(&self, path: &Path) -> io::Result<()> {
        let Some(parent) = path.parent() else { return Err(io::ErrorKind::InvalidInput.into()) };
        // Without a step on the mounted file system: its server may be dead.
        let point = path.to_owned();
        if let Some(point) = self.short(parent, move |_| mount::network_mount(&point)).await? {
            return self.unmount_network(&point).await;
        }
        let mounter = self.mounter.clone();
        self.short(path, move |path| mounter.unmount(path)).await
    }

    async fn apply_cgroup(&self, cgroup: &Cgroup) -> io::Result<Vec<UnsetLimit>> {
        let cgroup = cgroup.clone();
        self.cgroups(move |hierarchies| hierarchies.apply(&cgroup)).await
    }

    async fn remove_cgroup(&self, path: &Path) -> io::Result<()> {
        let path = path.to_owned();
        self.cgroups(move |hierarchies| hierarchies.remove(&path)).await
    }

    async fn list_cgroups(&self, path: &Path) -> io::Result<Vec<String>> {
        let path = path.to_owned();
        self.cgroups(move |hierarchies| Ok(hierarchies.children(&path)?.into_iter().collect())).await
    }

    async fn has_cgroup(&self, path: &Path) -> io::Result<bool> {
        let path = path.to_owned();
        self.cgroups(move |hierarchies| hierarchies.contains(&path)).await
    }

    async fn watch_dir(&self, path: &Path) -> io::Result<Hints> {
        self.watches.watch_dir(path).await
    }

    async fn check_http(&self, check: &HttpCheck) -> Result<FetchResponse, CheckError> {
        self.checker.check_http(check).await
    }

    async fn check_tcp(&self, check: &TcpCheck) -> io::Result<()> {
        self.checker.check_tcp(check).await
    }

    async fn check_grpc(&self, check: &GrpcCheck) -> Result<(), GrpcFailure> {
        check::check_grpc(check).await
    }

    async fn fetch(&self, request: &FetchRequest) -> io::Result<FetchResponse> {
        self.fetcher.fetch(request).await
    }
}

/// How long a server may take to agree to an unmount, as upstream's.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(60);

impl LinuxHost {
    /// By a program, which ends when it is killed; a thread would wait for the server. `point` is as the kernel knows it.
    async fn unmount_network(&self, point: &Path) -> io::Result<()> {
        let text = point.display().to_string();
        let umount = |args: &[&str]| {
            let args = args.iter().map(|arg| (*arg).to_owned()).chain([text.clone()]).collect();
            Program { timeout: UNMOUNT_TIMEOUT, ..Program::new("umount", args, point) }
        };
        let mut ended = self.programs.run(&umount(&[])).await;
        if ended.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::TimedOut) {
            // Without a look at the mount point, which would wait for the server again.
            ended = self.programs.run(&umount(&["-f", "-c"])).await;
        }
        let here = point.to_owned();
        let parent = point.parent().unwrap_or(point);
        if self.short(parent, move |_| mount::network_mount(&here)).await?.is_none() {
            return Ok(());
        }
        let output = ended?;
        let said = format!("{}{}", output.stdout, output.stderr);
        let message =
            format!("unmount failed: {}\nUnmounting arguments: {}\nOutput: {said}", output.status, point.display());
        Err(io::Error::other(message))
    }

    /// A bounded number of steps on the device of `path`.
    async fn short<T, E>(&self, path: &Path, work: impl FnOnce(&Path) -> Result<T, E> + Send + 'static) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<io::Error> + Send + 'static,
    {
        let owned = path.to_owned();
        self.lanes.run(path, Length::Short, move |_| work(&owned)).await
    }

    /// Where the hierarchies are mounted is constant while the node is up.
    async fn stats<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Trees, &mut Reader) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let trees = self.trees.clone();
        let work = move |_: &Path| {
            let trees = match trees.get() {
                Some(known) => known,
                None => {
                    let mounted = Trees::mounted()?;
                    trees.get_or_init(|| mounted)
                }
            };
            work(trees, &mut Reader::default())
        };
        self.short(Path::new(cgroup::BASE), work).await
    }

    /// All hierarchies count as one device: they are one part of the kernel.
    async fn cgroups<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Hierarchies) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        self.short(Path::new(cgroup::BASE), move |_| work(&Hierarchies::mounted()?)).await
    }
}

/// Runs on tokio's blocking pool, which only the agent's own work uses: its certificates and credentials, never a pod's
/// files. A panic there is propagated; a runtime shutdown is an error.
pub async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<io::Error> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        Err(_) => Err(io::Error::new(io::ErrorKind::Interrupted, "the agent is shutting down").into()),
    }
}
