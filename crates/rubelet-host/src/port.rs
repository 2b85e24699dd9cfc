//! What the agent needs of the node.
//!
//! Every call is bounded: by the caller's deadline, and where a size could be hostile by a limit in the arguments.

use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use rubelet_core::cgroups::Cgroup;

use crate::watch::Hints;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    pub name: String,
    /// Of the entry itself: a link is a link.
    pub kind: FileKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// Why a file could not be read as data.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("it is a {0:?}, not a regular file")]
    NotRegular(FileKind),
    #[error("it is larger than the limit of {limit_bytes} bytes")]
    TooLarge { limit_bytes: u64 },
    #[error(transparent)]
    Io(#[from] io::Error),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchRequest {
    pub url: String,
    pub headers: Vec<(String, String)>,
    pub limit_bytes: u64,
    pub timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchResponse {
    pub status: u16,
    pub body: Vec<u8>,
}

/// Files that a directory shows all at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Projection {
    /// By path below the directory.
    pub files: BTreeMap<PathBuf, ProjectedFile>,
    /// The group that may read them.
    pub group: Option<u32>,
    /// What the hidden directory that holds them is called, but for a number at its end: `..2026_11_16_00_23_38.`.
    pub stamp: String,
}

#[derive(Clone, PartialEq, Eq)]
pub struct ProjectedFile {
    pub content: Vec<u8>,
    pub mode: u32,
    pub owner: Option<u32>,
}

/// The content may be a secret: never in a log.
impl fmt::Debug for ProjectedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, mode {:o}, owner {:?}", self.content.len(), self.mode, self.owner)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projected {
    /// The directory showed these files already.
    Unchanged,
    Written,
}

/// What a probe or a hook asks: no certificate is checked, and redirects are followed on the same host only.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpCheck {
    pub url: String,
    /// `Host` among them replaces the URL's.
    pub headers: Vec<(String, String)>,
    pub timeout: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// Asked over TLS, the server answered without.
    #[error("http: server gave HTTP response to HTTPS client")]
    PlainHttp,
    /// The server answered, and its body broke off or did not end in time.
    #[error("{0}")]
    Body(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What a gRPC server is asked: is this service of yours healthy?
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GrpcCheck {
    pub host: String,
    pub port: u16,
    /// Empty means the server as a whole.
    pub service: String,
    pub user_agent: String,
    pub timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrpcFailure {
    /// Nobody spoke HTTP/2 in time.
    Unreachable,
    /// The server was there and its answer was not.
    Late,
    /// The server knows no health protocol; what it said.
    Unimplemented(String),
    /// Any other error, in the words Go has for it.
    Rpc(String),
    /// It answered with this state.
    Unhealthy(String),
}

#[async_trait]
pub trait Host: Send + Sync + 'static {
    /// Entries in lexical order.
    async fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>>;

    /// Reads a regular file, following links. Never blocks on a FIFO or a device.
    async fn read_file(&self, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;

    /// Reads a regular file of a directory that somebody else fills. Links are followed as if `root` were `/`: none leads out.
    async fn read_in_root(&self, root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;

    /// The last bytes of a regular file, at most `limit_bytes` of them, however long it is. Opens it as `read_file` does.
    async fn read_tail(&self, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;

    /// What `path` is, following links; `None` when nothing is there.
    async fn file_kind(&self, path: &Path) -> io::Result<Option<FileKind>>;

    /// How much the file system that holds `path` has in all.
    async fn capacity_bytes(&self, path: &Path) -> io::Result<u64>;

    /// Creates the directory and missing parents; sets the mode on the last one, whatever the umask.
    async fn make_dir(&self, path: &Path, mode: u32) -> io::Result<()>;

    /// Gives a directory, not what is in it, to a group that may read and write there; what is made in it belongs to the
    /// group too.
    async fn share_dir(&self, path: &Path, group: u32) -> io::Result<()>;

    /// Creates an empty file; what is there already stays as it is.
    async fn make_file(&self, path: &Path, mode: u32) -> io::Result<()>;

    /// Creates or replaces a file in one step: a reader sees the old or the new content, never a part.
    async fn write_file(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()>;

    /// Creates or replaces a symbolic link in one step.
    async fn make_link(&self, target: &Path, link: &Path) -> io::Result<()>;

    /// Makes an existing directory show exactly these files, all at once: a reader sees the old or the new, never a mixture.
    /// A failure leaves the old. What was put there by others stays.
    async fn project(&self, dir: &Path, projection: Projection) -> io::Result<Projected>;

    /// Where a symbolic link points; `None` when there is no link.
    async fn read_link(&self, path: &Path) -> io::Result<Option<PathBuf>>;

    /// Removes a file or a link; it is no error if it is gone.
    async fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes a tree without following links and without crossing into another mount: something mounted below is an
    /// error and stays untouched. It is no error if the tree is gone.
    async fn remove_tree(&self, path: &Path) -> io::Result<()>;

    /// Mounts a tmpfs; it is no error if one is mounted there already. Without a size it may take all memory of the node.
    async fn mount_tmpfs(&self, path: &Path, size_bytes: Option<u64>, mode: u32) -> io::Result<()>;

    /// Mounts what is at `sub_path` in a volume at `target`, which is made; it is no error if that is mounted there already.
    /// Missing directories of the volume are made with its mode. No link leads out of the volume, whoever put it there.
    async fn bind_sub_path(&self, volume: &Path, sub_path: &Path, target: &Path) -> io::Result<()>;

    /// Mount points at or below `path`, deepest first, as the kernel knows them (links in `path` resolved).
    async fn mounts_below(&self, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Takes away the topmost mount at `path`; it is no error if there is none. A busy one stays and is an error.
    async fn unmount(&self, path: &Path) -> io::Result<()>;

    /// Creates a cgroup and sets its limits. Returns what could not be set, for people.
    async fn apply_cgroup(&self, cgroup: &Cgroup) -> io::Result<Vec<String>>;

    /// Kills what runs in a cgroup and removes it with all below it; it is no error if it is gone. Until the last process
    /// is dead it is busy, and stays.
    async fn remove_cgroup(&self, path: &Path) -> io::Result<()>;

    /// The names of the cgroups right below this one; none when it is not there.
    async fn list_cgroups(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Whether there is a cgroup of this path, in whichever hierarchy.
    async fn has_cgroup(&self, path: &Path) -> io::Result<bool>;

    /// Sends a hint whenever something in the directory may have changed. `Err` when it cannot be watched (it does not
    /// exist, or the node is out of watches); the channel closes when the directory itself goes away.
    /// Hints are coalesced: the channel holds one.
    async fn watch_dir(&self, path: &Path) -> io::Result<Hints>;

    /// HTTP(S) GET of a container. The body is cut at 10 KiB, any status is an answer; so is a redirect to another host.
    async fn check_http(&self, check: &HttpCheck) -> Result<FetchResponse, CheckError>;

    /// Opens a TCP connection and closes it.
    async fn check_tcp(&self, host: &str, port: u16, timeout: Duration) -> io::Result<()>;

    /// Asks a gRPC server for its health, without encryption, and dials until the time is over.
    async fn check_grpc(&self, check: &GrpcCheck) -> Result<(), GrpcFailure>;

    /// HTTP(S) GET. An answer over the limit is an error, any status is an answer.
    async fn fetch(&self, request: &FetchRequest) -> io::Result<FetchResponse>;
}
