//! A unix socket only its owner and root can open.
//!
//! Owns: its file, from before it is reachable until the process ends, and the check of the peer's user.
//! The socket is created in a private directory, gets its mode there, and is then renamed to its place
//! atomically: no other user can connect at any time, and a socket left by a dead agent is replaced. A lock file beside it,
//! whose lock the kernel releases with the process, tells a dead agent from a running one.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError},
    future::ready,
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    net::{UnixListener, UnixStream},
    time::{sleep, timeout},
};
use tracing::warn;

use crate::server::connections::{Accept, Opened};

/// An agent that is told to stop, or killed, is gone by then.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const LOCK_RETRY: Duration = Duration::from_millis(100);

/// The socket path for this root directory.
pub(crate) fn socket_path(root_dir: &Path) -> PathBuf {
    root_dir.join("rubelet.sock")
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    #[error("another rubelet is running on {0:?}")]
    Taken(PathBuf),
    #[error("failed to open the socket {path:?}")]
    Io { path: PathBuf, source: io::Error },
}

#[derive(Debug)]
pub(crate) struct AdminSocket {
    listener: UnixListener,
    path: PathBuf,
    owner_uid: u32,
    /// Held for as long as the socket is ours.
    _lock: File,
}

impl AdminSocket {
    /// Waits for an agent that is just ending: the kernel releases its lock only when its last thread is gone.
    pub(crate) async fn bind_when_free(path: &Path) -> Result<AdminSocket, SocketError> {
        let when_free = async {
            loop {
                match AdminSocket::bind(path) {
                    Err(SocketError::Taken(_)) => sleep(LOCK_RETRY).await,
                    bound => return bound,
                }
            }
        };
        timeout(LOCK_TIMEOUT, when_free).await.unwrap_or_else(|_elapsed| AdminSocket::bind(path))
    }

    fn bind(path: &Path) -> Result<AdminSocket, SocketError> {
        let failed = |source| SocketError::Io { path: path.to_owned(), source };
        let dir = path.parent().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        DirBuilder::new().recursive(true).mode(0o750).create(dir).map_err(failed)?;

        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.with_added_extension("lock"))
            .map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(SocketError::Taken(path.to_owned())),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let (listener, owner_uid) = bind_in_private(path).map_err(failed)?;
        Ok(AdminSocket { listener, path: path.to_owned(), owner_uid, _lock: lock })
    }
}

impl Drop for AdminSocket {
    /// The lock is held, so the file there is stale or ours.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Accept for AdminSocket {
    type Raw = UnixStream;
    type Stream = UnixStream;

    /// The file's mode keeps others out already; this check holds even if the mode is changed.
    async fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            let uid = stream.peer_cred()?.uid();
            if uid == 0 || uid == self.owner_uid {
                return Ok(stream);
            }
            warn!(uid, "rejected a connection to the root-only socket");
        }
    }

    fn open(&self, raw: UnixStream) -> impl Future<Output = io::Result<Opened<UnixStream>>> + Send + 'static {
        ready(Ok(Opened::plain(raw)))
    }
}

/// Connects to the agent's socket, whatever the length of its path.
pub(crate) async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (dir, name) = dir_and_name(path)?;
    UnixStream::connect(beneath(&dir).join(name)).await
}

fn bind_in_private(path: &Path) -> io::Result<(UnixListener, u32)> {
    let private = path.with_added_extension("new");
    // Left by an agent that died at this point. Only the holder of the lock gets here.
    match fs::remove_dir_all(&private) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    DirBuilder::new().mode(0o700).create(&private)?;
    let made = private.join("socket");
    let dir = File::open(&private)?;
    let listener = UnixListener::bind(beneath(&dir).join("socket"))?;
    fs::set_permissions(&made, Permissions::from_mode(0o600))?;
    let owner_uid = fs::symlink_metadata(&made)?.uid();
    fs::rename(&made, path)?;
    fs::remove_dir(&private)?;
    Ok((listener, owner_uid))
}

fn dir_and_name(path: &Path) -> io::Result<(File, &Path)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((File::open(dir)?, Path::new(name)))
}

/// A short path to an open directory: a socket address holds 107 bytes only, and root directories may be longer.
fn beneath(dir: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::{FileTypeExt, PermissionsExt},
        path::Path,
    };

    use super::{AdminSocket, SocketError, connect, socket_path};
    use crate::server::connections::Accept;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn the_socket_is_for_its_owner_only_and_goes_with_the_agent() {
        let root = tempfile::tempdir().unwrap();
        let path = socket_path(&root.path().join("not/yet/there"));
        let socket = AdminSocket::bind(&path).unwrap();
        let metadata = fs::symlink_metadata(&path).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.permissions().mode() & 0o7777, 0o600);
        assert_eq!(names(path.parent().unwrap()), ["rubelet.sock", "rubelet.sock.lock"]);
        let (accepted, connected) = tokio::join!(Accept::accept(&socket), connect(&path));
        accepted.unwrap();
        connected.unwrap();
        drop(socket);
        assert_eq!(names(path.parent().unwrap()), ["rubelet.sock.lock"]);
    }

    #[tokio::test]
    async fn only_a_dead_agents_socket_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let path = socket_path(root.path());
        let first = AdminSocket::bind(&path).unwrap();
        assert!(matches!(AdminSocket::bind(&path), Err(SocketError::Taken(_))));
        connect(&path).await.unwrap();
        assert!(matches!(AdminSocket::bind_when_free(&path).await, Err(SocketError::Taken(_))));
        let (waited, ()) = tokio::join!(AdminSocket::bind_when_free(&path), async { drop(first) });
        drop(waited.unwrap());

        // The leftovers of an agent killed while it ran, and of one killed while it opened the socket.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        fs::create_dir(path.with_added_extension("new")).unwrap();
        fs::write(path.with_added_extension("new").join("socket"), "").unwrap();
        assert!(connect(&path).await.is_err());
        let second = AdminSocket::bind(&path).unwrap();
        connect(&path).await.unwrap();
        assert_eq!(names(root.path()), ["rubelet.sock", "rubelet.sock.lock"]);
        drop(second);
    }

    #[tokio::test]
    async fn a_path_longer_than_a_socket_address_works() {
        let root = tempfile::tempdir().unwrap();
        let path = socket_path(&root.path().join("d".repeat(150)));
        let socket = AdminSocket::bind(&path).unwrap();
        let (accepted, connected) = tokio::join!(Accept::accept(&socket), connect(&path));
        accepted.unwrap();
        connected.unwrap();
    }

    #[tokio::test]
    async fn the_mode_does_not_depend_on_the_directory() {
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), Permissions::from_mode(0o777)).unwrap();
        let path = socket_path(root.path());
        let _socket = AdminSocket::bind(&path).unwrap();
        assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    }
}
