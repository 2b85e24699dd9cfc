//! The host port.
//!
//! Every call is bounded: by the caller's deadline, and where a size could be hostile by a limit in the arguments.

use std::{
    collections::BTreeMap,
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use rubelet_core::{
    cgroups::{Cgroup, UnsetLimit},
    id::PodUid,
};

use crate::{
    stats::disk::{FileSystem, Usage},
    watch::Hints,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    pub name: String,
    /// Of the entry itself: links are not followed.
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

/// Differs between a file and another one that took its name later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileIdentity {
    pub device: u64,
    pub inode: u64,
    /// A file system may give the number of a removed file to the next one. `None` where it does not know the time.
    pub created_at: Option<SystemTime>,
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

/// Files that a directory shows atomically.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Projection {
    /// By path below the directory.
    pub files: BTreeMap<PathBuf, ProjectedFile>,
    /// The group that may read them.
    pub group: Option<u32>,
    /// The name of the hidden directory that holds them, without its number: `..2026_11_16_00_23_38.`.
    pub stamp: String,
}

#[derive(Clone, PartialEq, Eq)]
pub struct ProjectedFile {
    pub content: Vec<u8>,
    pub mode: u32,
    pub owner: Option<u32>,
}

/// The content may be a secret: never logged.
impl fmt::Debug for ProjectedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, mode {:o}, owner {:?}", self.content.len(), self.mode, self.owner)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projected {
    /// The directory had these files already.
    Unchanged,
    Written,
}

/// The HTTP request of a probe or a hook: no certificate is verified, and redirects are followed on the same host only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpCheck {
    /// Waits only for its own name look-ups.
    pub pod: PodUid,
    pub url: String,
    /// `Host` in it replaces the URL's.
    pub headers: Vec<(String, String)>,
    pub timeout: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The server responded to TLS with plain HTTP.
    #[error("http: server gave HTTP response to HTTPS client")]
    PlainHttp,
    /// The server responded, and its body broke off or timed out.
    #[error("{0}")]
    Body(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A TCP connection that is opened and closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpCheck {
    /// Waits only for its own name look-ups.
    pub pod: PodUid,
    pub host: String,
    pub port: u16,
    pub timeout: Duration,
}

/// The gRPC health check of one service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GrpcCheck {
    /// An IP address: such a probe names no host.
    pub host: String,
    pub port: u16,
    /// Empty means the server as a whole.
    pub service: String,
    pub user_agent: String,
    pub timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrpcFailure {
    /// No HTTP/2 connection in time.
    Unreachable,
    /// The node lacked descriptors, memory or ports: nothing is known of the server.
    Exhausted(String),
    /// Connected, but no response in time.
    Late,
    /// The server does not implement the health protocol; its message.
    Unimplemented(String),
    /// Any other error, in Go's words.
    Rpc(String),
    /// It responded with this state.
    Unhealthy(String),
}

/// Memory and processes of the node; what cannot be read is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeFigures {
    pub memory: Option<MemoryFigures>,
    /// Of all pods together, if they have a limit.
    pub memory_of_pods: Option<MemoryFigures>,
    /// How many processes and threads there may be, and are.
    pub max_tasks: Option<u64>,
    pub tasks: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryFigures {
    pub limit_bytes: u64,
    /// All that cannot be freed at once.
    pub working_set_bytes: u64,
}

/// Memory and processes of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFigures {
    pub working_set_bytes: u64,
    /// By the names of the cgroups below the pod's.
    pub containers: BTreeMap<String, ContainerFigures>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerFigures {
    pub working_set_bytes: u64,
    pub processes: u64,
}

/// What a volume holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeFigures {
    pub used: Usage,
    pub on: FileSystem,
    /// It has a file system of its own, and uses none of its parent's.
    pub is_mount: bool,
}

/// How a tree is given to a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    pub group: u32,
    /// The group may read, not write.
    pub read_only: bool,
    /// Nothing is done if the top of the tree has this group and access already.
    pub only_on_root_mismatch: bool,
}

/// How many files of a tree were given to a group so far. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct SharedFiles(Arc<AtomicU64>);

impl SharedFiles {
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A program of the node, started without a shell.
#[derive(Clone, PartialEq, Eq)]
pub struct Program {
    pub name: String,
    pub args: Vec<String>,
    /// The mount point or device that it works on: one program at a time.
    pub on: PathBuf,
    pub timeout: Duration,
    pub when_late: WhenLate,
    /// Where systemd runs, it and the daemons that it starts get a scope of their own, described by this text.
    pub scope: Option<String>,
}

impl Program {
    /// Ended after a minute.
    pub fn new(name: &str, args: Vec<String>, on: &Path) -> Self {
        let (name, on, timeout) = (name.to_owned(), on.to_owned(), Duration::from_secs(60));
        Program { name, args, on, timeout, when_late: WhenLate::Kill, scope: None }
    }
}

/// The arguments may be secret: never logged.
impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.name, self.on.display())
    }
}

/// What happens to a program whose caller does not wait any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenLate {
    Kill,
    /// Half of its work would be worse than none.
    LeaveRunning,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramOutput {
    pub status: Ended,
    pub stdout: String,
    pub stderr: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Exit(i32),
    Signal(i32),
}

impl ProgramOutput {
    pub fn is_success(&self) -> bool {
        self.status == Ended::Exit(0)
    }
}

/// As Go words it.
impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Exit(code) => write!(f, "exit status {code}"),
            Ended::Signal(9) => f.write_str("signal: killed"),
            Ended::Signal(number) => write!(f, "signal: {number}"),
        }
    }
}

/// One line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPoint {
    pub path: PathBuf,
    pub fs_type: String,
    /// The device, the server's directory, or any text given to mount.
    pub source: String,
    /// Major and minor number: the same for all mounts of one file system.
    pub device: (u32, u32),
    /// The directory of that file system which is shown.
    pub root: PathBuf,
    /// Of this mount, not of its file system: `rw,nosuid`.
    pub options: String,
}

/// How far the walk through a volume is.
#[derive(Debug, Default)]
pub struct WalkProgress(Mutex<Option<VolumeFigures>>);

impl WalkProgress {
    /// What was counted so far; `None` before the first slice.
    pub fn get(&self) -> Option<VolumeFigures> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set(&self, figures: VolumeFigures) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(figures);
    }
}

#[async_trait]
pub trait Host: Send + Sync + 'static {
    /// Entries in lexical order.
    async fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>>;

    /// Reads a regular file, following links. Never blocks on a FIFO or a device.
    async fn read_file(&self, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;

    /// Reads a regular file of a directory with untrusted content. Links are resolved as if `root` were `/`.
    async fn read_in_root(&self, root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;

    /// The last bytes of a regular file, at most `limit_bytes` of them, however long it is. A link on the way from `root` to
    /// `path` is an error.
    async fn read_tail(&self, root: &Path, path: &Path, limit_bytes: u64) -> Result<Vec<u8>, ReadError>;

    /// The kind of `path`, following links; `None` if it does not exist.
    async fn file_kind(&self, path: &Path) -> io::Result<Option<FileKind>>;

    /// Which file is at `path`, a link itself; `None` if there is none.
    async fn file_identity(&self, path: &Path) -> io::Result<Option<FileIdentity>>;

    /// The group that `path` belongs to, following links.
    async fn file_group(&self, path: &Path) -> io::Result<u32>;

    /// The file system that holds `path`.
    async fn file_system(&self, path: &Path) -> io::Result<FileSystem>;

    /// Memory and processes of the node, and of the cgroup of all pods.
    async fn node_figures(&self, kubepods: Option<&Path>) -> io::Result<NodeFigures>;

    /// Memory and processes of the pod with this cgroup; `None` if there is none.
    async fn pod_figures(&self, cgroup: &Path) -> io::Result<Option<PodFigures>>;

    /// What the directory of a volume holds. Links are not followed, and other file systems below it are not counted. Takes
    /// as long as the budget of all walks wants; the caller need not wait, and sees the progress.
    async fn volume_figures(&self, path: &Path, progress: &WalkProgress) -> io::Result<VolumeFigures>;

    /// What the files directly in a directory use, or a file.
    async fn files_usage(&self, path: &Path) -> io::Result<Usage>;

    /// Creates the directory and missing parents; sets the mode of the last one, whatever the umask. Follows links: for
    /// paths of the operator.
    async fn make_dir(&self, path: &Path, mode: u32) -> io::Result<()>;

    /// As `make_dir` where pods may be able to write: a link on the way from `root` to `path` is an error.
    async fn make_dir_beneath(&self, root: &Path, path: &Path, mode: u32) -> io::Result<()>;

    /// Creates an empty file with this mode; an existing regular one is unchanged. Links are errors.
    async fn make_file_beneath(&self, root: &Path, path: &Path, mode: u32) -> io::Result<()>;

    /// As `write_file`; a link in the file's place is replaced, one on the way to it is an error.
    async fn write_file_beneath(&self, root: &Path, path: &Path, content: &[u8], mode: u32) -> io::Result<()>;

    /// As `remove_file`; a link on the way to it is an error.
    async fn remove_file_beneath(&self, root: &Path, path: &Path) -> io::Result<()>;

    /// The sizes of regular files below `root`; `None` where there is no file, nothing where it cannot be seen. No link and no
    /// mount below `root` is followed. The first write to each afterwards is a result of `next_writes`, unless the inotify limit
    /// is reached.
    async fn sizes_and_watch(&self, root: &Path, paths: Vec<PathBuf>) -> io::Result<BTreeMap<PathBuf, Option<u64>>>;

    /// Waits until files were written to that `sizes_and_watch` looked at. For one caller at a time. Cancel safe.
    async fn next_writes(&self) -> Vec<PathBuf>;

    /// Waits until a file system answers again on which calls failed because it did not (`lanes::is_late`). For one caller at a time.
    /// Cancel safe.
    async fn file_system_answered(&self);

    /// Renames a file within its directory. It is an error if the name is taken, or a link on the way to it.
    async fn rename_beneath(&self, root: &Path, path: &Path, name: &str) -> io::Result<()>;

    /// Replaces a regular file by its compressed form, `<file>.gz`: at any moment one of the two is whole. `<file>.tmp` is
    /// used meanwhile.
    async fn compress_beneath(&self, root: &Path, path: &Path) -> io::Result<()>;

    /// Gives a directory, not its content, to a group with read and write access; new files in it belong to the
    /// group too.
    async fn share_dir(&self, path: &Path, group: u32) -> io::Result<()>;

    /// As `share_dir`, for a directory with all below it, whatever is mounted there. No link is followed. The caller sees the
    /// progress; nothing is counted if nothing was to do.
    async fn share_tree(&self, path: &Path, sharing: Sharing, done: &SharedFiles) -> io::Result<()>;

    /// Creates an empty file; an existing one is unchanged. A link in its place is an error.
    async fn make_file(&self, path: &Path, mode: u32) -> io::Result<()>;

    /// Creates or replaces a file atomically: a reader sees the old or the new content, never a part.
    async fn write_file(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()>;

    /// As `write_file`; the file and its directory entry are on disk when it returns, and never a part of it.
    async fn write_durably(&self, path: &Path, content: &[u8], mode: u32) -> io::Result<()>;

    /// Writes the entries of a directory to disk.
    async fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Creates or replaces a symbolic link atomically.
    async fn make_link(&self, target: &Path, link: &Path) -> io::Result<()>;

    /// Makes an existing directory show exactly these files, atomically: a reader sees the old or the new, never a mixture.
    /// A failure leaves the old. Files of others stay.
    async fn project(&self, dir: &Path, projection: Projection) -> io::Result<Projected>;

    /// The target of a symbolic link; `None` if there is no link.
    async fn read_link(&self, path: &Path) -> io::Result<Option<PathBuf>>;

    /// Removes a file or a link; a missing one is no error.
    async fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes a directory in which there is nothing but files of these names, which are ours. Anything else in it is somebody's
    /// data: an error, and nothing is removed. A missing directory is no error.
    async fn remove_dir(&self, path: &Path, own: &'static [&'static str]) -> io::Result<()>;

    /// Removes a tree without following links or crossing mounts: a mount below is an
    /// error and stays untouched. A missing tree is no error.
    async fn remove_tree(&self, path: &Path) -> io::Result<()>;

    /// Mounts a tmpfs; it is no error if one is mounted there already. Without a size it may use all memory of the node.
    async fn mount_tmpfs(&self, path: &Path, size_bytes: Option<u64>, mode: u32) -> io::Result<()>;

    /// Mounts huge pages of this size; it is no error if some are mounted there already.
    async fn mount_huge_pages(&self, path: &Path, page_bytes: u64) -> io::Result<()>;

    /// Mounts `sub_path` of a volume at `target`, which is created; it is no error if it is mounted there already.
    /// Missing directories of the volume are created with its mode. Links never leave the volume.
    async fn bind_sub_path(&self, volume: &Path, sub_path: &Path, target: &Path) -> io::Result<()>;

    /// Mount points at or below `path`, deepest first, as the kernel knows them (links in `path` resolved).
    async fn mounts_below(&self, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Releases the loop devices over this file; none is no error.
    async fn release_loop_devices(&self, file: &Path) -> io::Result<()>;

    /// The whole mount table, in the order of mounting.
    async fn mount_points(&self) -> io::Result<Vec<MountPoint>>;

    /// Unmounts the topmost mount at `path`; it is no error if there is none. A busy one stays and is an error. One of a server
    /// that does not answer is forced after a minute.
    async fn unmount(&self, path: &Path) -> io::Result<()>;

    /// Runs a program to its end, or until it is late. One at a time on one path: while an earlier one has not ended, it is an
    /// error.
    async fn run_program(&self, program: &Program) -> io::Result<ProgramOutput>;

    /// Writes to a control file of the kernel, which must exist. The kernel may take long to do what it asks for.
    async fn write_control(&self, path: &Path, content: &[u8], timeout: Duration) -> io::Result<()>;

    /// Creates a cgroup and sets its limits. Returns the limits that failed.
    async fn apply_cgroup(&self, cgroup: &Cgroup) -> io::Result<Vec<UnsetLimit>>;

    /// Kills all processes in a cgroup and removes it with all below it; a missing one is no error. Until the last process
    /// is dead it is busy, and stays.
    async fn remove_cgroup(&self, path: &Path) -> io::Result<()>;

    /// The names of the direct children of this cgroup; none if it does not exist.
    async fn list_cgroups(&self, path: &Path) -> io::Result<Vec<String>>;

    /// Whether the cgroup exists in any hierarchy.
    async fn has_cgroup(&self, path: &Path) -> io::Result<bool>;

    /// Sends a hint whenever the directory may have changed. `Err` if it cannot be watched (it does not
    /// exist, or the inotify limit is reached); the channel closes when the directory itself is removed.
    /// Hints are coalesced: the channel holds one.
    async fn watch_dir(&self, path: &Path) -> io::Result<Hints>;

    /// HTTP(S) GET to a container. The body is cut at 10 KiB, any status is a response; so is a redirect to another host.
    async fn check_http(&self, check: &HttpCheck) -> Result<FetchResponse, CheckError>;

    /// Opens a TCP connection and closes it.
    async fn check_tcp(&self, check: &TcpCheck) -> io::Result<()>;

    /// Checks the health of a gRPC server without encryption, and redials until the deadline.
    async fn check_grpc(&self, check: &GrpcCheck) -> Result<(), GrpcFailure>;

    /// HTTP(S) GET. A response over the limit is an error, any status is a response.
    async fn fetch(&self, request: &FetchRequest) -> io::Result<FetchResponse>;
}
