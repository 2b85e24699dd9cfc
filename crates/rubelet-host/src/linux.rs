//! The Linux node.
//!
//! Owns: `LinuxHost`, which runs every call that may block on tokio's blocking pool. Never: blocks the caller's thread,
//! retries, decides. An abandoned call may still finish on its thread; only the long ones (removing a tree) stop early.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use rubelet_core::cgroups::Cgroup;

use crate::{
    cgroup::Hierarchies,
    check::{self, Checker},
    fetch::Fetcher,
    fs, mount,
    port::{
        CheckError, DirEntry, FetchRequest, FetchResponse, FileKind, GrpcCheck, GrpcFailure, Host, HttpCheck,
        Projected, Projection, ReadError,
    },
    watch::{Hints, Interest, Watches},
};

#[derive(Clone, Debug)]
pub struct LinuxHost {
    mounter: mount::Mounter,
    fetcher: Fetcher,
    checker: Checker,
    watches: Watches,
}

impl Default for LinuxHost {
    fn default() -> Self {
        LinuxHost {
            mounter: mount::Mounter::default(),
            fetcher: Fetcher::default(),
            checker: Checker::default(),
            watches: Watches::new(Interest::Entries),
        }
    }
}

#[async_trait]
impl Host for LinuxHost {
    async fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let path = path.to_owned();
        blocking(move || fs::list_dir(&path)).await
    }

    async fn read_file(&self, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        let path = path.to_owned();
        blocking(move || fs::read_file(&path, limit_bytes)).await
    }

    async fn read_in_root(&self, root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        let (root, path) = (root.to_owned(), path.to_owned());
        blocking(move || fs::read_in_root(&root, &path, limit_bytes)).await
    }

    async fn read_tail(&self, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError> {
        let path = path.to_owned();
        blocking(move || fs::read_tail(&path, limit_bytes)).await
    }

    async fn file_kind(&self, path: &Path) -> io::Result<Option<FileKind>> {
        let path = path.to_owned();
        blocking(move || fs::file_kind(&path)).await
    }

    async fn capacity_bytes(&self, path: &Path) -> io::Result<u64> {
        let path = path.to_owned();
        blocking(move || fs::capacity_bytes(&path)).await
    }

    async fn make_dir(&self, path: &Path, mode: u32) -> io::Result<()> {
        let path = path.to_owned();
        blocking(move || fs::make_dir(&path, mode)).await
    }

    async fn share_dir(&self, path: &Path, group: u32) -> io::Result<()> {
        let path = path.to_owned();
        blocking(move || fs::share_dir(&path, group)).await
    }

    async fn make_file(&self, path: &Path, mode: u32) -> io::Result<()> {
        let path = path.to_owned();
        blocking(move || fs::make_file(&path, mode)).await
    }

    async fn write_file(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        let (path, content) = (path.to_owned(), content.to_owned());
        blocking(move || fs::write_file(&path, &content, mode)).await
    }

    async fn make_link(&self, target: &Path, link: &Path) -> io::Result<()> {
        let (target, link) = (target.to_owned(), link.to_owned());
        blocking(move || fs::make_link(&target, &link)).await
    }

    async fn project(&self, dir: &Path, projection: Projection) -> io::Result<Projected> {
        let dir = dir.to_owned();
        blocking(move || fs::project(&dir, &projection)).await
    }

    async fn read_link(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        let path = path.to_owned();
        blocking(move || fs::read_link(&path)).await
    }

    async fn remove_file(&self, path: &Path) -> io::Result<()> {
        let path = path.to_owned();
        blocking(move || fs::remove_file(&path)).await
    }

    async fn remove_tree(&self, path: &Path) -> io::Result<()> {
        let path = path.to_owned();
        let abandoned = Abandoned::default();
        let flag = abandoned.0.clone();
        blocking(move || fs::remove_tree(&path, &flag)).await
    }

    async fn mount_tmpfs(&self, path: &Path, size_bytes: Option<u64>, mode: u32) -> io::Result<()> {
        let (mounter, path) = (self.mounter.clone(), path.to_owned());
        blocking(move || mounter.mount_tmpfs(&path, size_bytes, mode)).await
    }

    async fn bind_sub_path(&self, volume: &Path, sub_path: &Path, target: &Path) -> io::Result<()> {
        let mounter = self.mounter.clone();
        let (volume, sub_path, target) = (volume.to_owned(), sub_path.to_owned(), target.to_owned());
        blocking(move || mounter.bind_sub_path(&volume, &sub_path, &target)).await
    }

    async fn mounts_below(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let path = path.to_owned();
        blocking(move || mount::mounts_below(&path)).await
    }

    async fn unmount(&self, path: &Path) -> io::Result<()> {
        let (mounter, path) = (self.mounter.clone(), path.to_owned());
        blocking(move || mounter.unmount(&path)).await
    }

    async fn apply_cgroup(&self, cgroup: &Cgroup) -> io::Result<Vec<String>> {
        let cgroup = cgroup.clone();
        blocking(move || Hierarchies::mounted()?.apply(&cgroup)).await
    }

    async fn remove_cgroup(&self, path: &Path) -> io::Result<()> {
        let path = path.to_owned();
        blocking(move || Hierarchies::mounted()?.remove(&path)).await
    }

    async fn list_cgroups(&self, path: &Path) -> io::Result<Vec<String>> {
        let path = path.to_owned();
        blocking(move || Ok(Hierarchies::mounted()?.children(&path)?.into_iter().collect())).await
    }

    async fn has_cgroup(&self, path: &Path) -> io::Result<bool> {
        let path = path.to_owned();
        blocking(move || Hierarchies::mounted()?.contains(&path)).await
    }

    async fn watch_dir(&self, path: &Path) -> io::Result<Hints> {
        self.watches.watch_dir(path).await
    }

    async fn check_http(&self, check: &HttpCheck) -> Result<FetchResponse, CheckError> {
        self.checker.check_http(check).await
    }

    async fn check_tcp(&self, host: &str, port: u16, timeout: Duration) -> io::Result<()> {
        check::check_tcp(host, port, timeout).await
    }

    async fn check_grpc(&self, check: &GrpcCheck) -> Result<(), GrpcFailure> {
        check::check_grpc(check).await
    }

    async fn fetch(&self, request: &FetchRequest) -> io::Result<FetchResponse> {
        self.fetcher.fetch(request).await
    }
}

/// Set when the caller's future is dropped, so that long work on a thread ends soon after.
#[derive(Default)]
struct Abandoned(Arc<AtomicBool>);

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs on the blocking pool. A panic there is propagated; a runtime shutdown is an error.
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
