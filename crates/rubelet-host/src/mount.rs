//! The mount table, and the operations on it.
//!
//! Owns: reading `/proc/self/mountinfo`, mounting tmpfs and subPaths (`mount/sub_path.rs`), sharing, unmounting. Never: lazy or
//! forced unmounts, shell commands.
//! Upstream: `k8s.io/mount-utils`, `emptydir.setupTmpfs`.

mod sub_path;

use std::{
    collections::BTreeSet,
    ffi::{CString, OsString},
    fs::File,
    io::{self, Read as _, Seek as _},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{AtFlags, CWD},
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, UnmountFlags},
};

use crate::port::MountPoint;

/// Types of file systems whose server may not answer an unmount.
const NETWORK_TYPES: [&str; 2] = ["nfs", "nfs4"];

/// One line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub point: PathBuf,
    pub fs_type: String,
    /// The device, the server's directory, or any text given to mount.
    pub source: String,
    pub major: u32,
    pub minor: u32,
    /// The directory of the file system that is shown.
    pub root: PathBuf,
    /// Mounts below it propagate to its peers.
    pub is_shared: bool,
    /// Of the mount, not of its file system.
    pub options: String,
}

/// Mount points at or below `path`, deepest first. A missing path has none.
pub fn mounts_below(path: &Path) -> io::Result<Vec<PathBuf>> {
    let Some(path) = resolved(path)? else { return Ok(Vec::new()) };
    let mut points: Vec<PathBuf> = points()?.iter().filter(|point| point.starts_with(&path)).cloned().collect();
    // Of two mounts on one point the table lists the upper one last; it must be unmounted first.
    points.reverse();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    Ok(points)
}

/// The whole table.
pub fn mount_points() -> io::Result<Vec<MountPoint>> {
    let table = mount_table()?.into_iter();
    Ok(table
        .map(|Mount { point: path, fs_type, source, major, minor, root, options, .. }| MountPoint {
            path,
            fs_type,
            source,
            device: (major, minor),
            root,
            options,
        })
        .collect())
}

/// The path as the kernel knows it, if the file system mounted right there is a server's. Looks at its parent and at the mount
/// table only.
pub fn network_mount(path: &Path) -> io::Result<Option<PathBuf>> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
    let Some(parent) = resolved(parent)? else { return Ok(None) };
    let point = parent.join(name);
    Ok(top_mount(&point)?.filter(|mount| NETWORK_TYPES.contains(&&*mount.fs_type)).map(|mount| mount.point))
}

/// Gives `path` shared propagation: as part of a shared mount, or with a bind mount of its own.
pub fn make_rshared(path: &Path) -> io::Result<()> {
    // The last line that leads there is the uppermost mount.
    let is_shared = mount_table()?.iter().rfind(|mount| path.starts_with(&mount.point)).is_some_and(|on| on.is_shared);
    if !is_shared {
        rustix::mount::mount_bind(path, path)?;
        rustix::mount::mount_change(path, MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
    }
    Ok(())
}

/// Changes the mount table, one change of a mount point at a time: looking whether something is mounted and mounting it are
/// two steps. Holds the mount points that are being changed; a call that hangs in one of them holds up no other.
#[derive(Clone, Debug, Default)]
pub struct Mounter(Arc<Mutex<BTreeSet<PathBuf>>>);

/// A mount point that a call changes. Dropping it allows the next change.
#[derive(Debug)]
struct Changing<'a> {
    mounter: &'a Mounter,
    target: &'a Path,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.mounter.targets().remove(self.target);
    }
}

impl Mounter {
    /// An error while an earlier call for the same mount point still runs. Its caller may have stopped waiting for it.
    fn change<'a>(&'a self, target: &'a Path) -> io::Result<Changing<'a>> {
        if self.targets().insert(target.to_owned()) {
            return Ok(Changing { mounter: self, target });
        }
        let message = format!("an earlier change of the mount at {} has not ended yet", target.display());
        Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
    }

    fn targets(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn mount_tmpfs(&self, path: &Path, size_bytes: Option<u64>, mode: u32) -> io::Result<()> {
        let _changing = self.change(path)?;
        let path = resolved(path)?.ok_or(io::ErrorKind::NotFound)?;
        if is_mounted(&path, TMPFS_MAGIC)? {
            return Ok(());
        }
        let size = size_bytes.map_or("100%".to_owned(), |bytes| bytes.to_string());
        let options = format!("size={size},mode={mode:o}");
        // What a pod keeps in memory must not reach the disk; kernels before 6.4 do not know the option.
        match mount_tmpfs_with(&path, &format!("{options},noswap")) {
            Err(Errno::INVAL) => Ok(mount_tmpfs_with(&path, &options)?),
            done => Ok(done?),
        }
    }

    /// With the mode and owner that the kernel gives them, as upstream.
    pub fn mount_huge_pages(&self, path: &Path, page_bytes: u64) -> io::Result<()> {
        let _changing = self.change(path)?;
        let path = resolved(path)?.ok_or(io::ErrorKind::NotFound)?;
        if is_mounted(&path, HUGETLBFS_MAGIC)? {
            return Ok(());
        }
        let options = CString::new(format!("pagesize={page_bytes}")).expect("made of numbers and words");
        Ok(rustix::mount::mount("nodev", path, "hugetlbfs", MountFlags::empty(), options.as_c_str())?)
    }

    /// It is no error if nothing is mounted there. Never follows a link in the last place.
    pub fn unmount(&self, path: &Path) -> io::Result<()> {
        let _changing = self.change(path)?;
        match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::INVAL) if resolved(path)?.is_none_or(|path| matches!(top_mount(&path), Ok(None))) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
const HUGETLBFS_MAGIC: rustix::fs::FsWord = 0x9584_58f6;

/// Whether a file system of this kind is mounted exactly there. Every look at a pod checks this, so it does not read the mount table, which
/// has a few lines for every pod.
fn is_mounted(path: &Path, magic: rustix::fs::FsWord) -> io::Result<bool> {
    Ok(is_mount_point(path)? && rustix::fs::statfs(path)?.f_type == magic)
}

/// Whether another file system than around it is mounted right there.
pub fn is_mount_point(path: &Path) -> io::Result<bool> {
    let own = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW)?;
    let parent = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(own.st_dev != rustix::fs::statat(CWD, parent, AtFlags::empty())?.st_dev)
}

fn mount_tmpfs_with(path: &Path, options: &str) -> rustix::io::Result<()> {
    let options = CString::new(options).expect("made of numbers and words");
    rustix::mount::mount("tmpfs", path, "tmpfs", MountFlags::empty(), options.as_c_str())
}

/// Whether the kernel can keep a tmpfs out of the swap: it does so for one below `dir`, which is unmounted again. Without a
/// test the answer is no.
pub fn supports_noswap(dir: &Path) -> bool {
    let probe = dir.join(format!("tmpfs-noswap-test-{}", std::process::id()));
    if std::fs::create_dir(&probe).is_err() {
        return false;
    }
    let is_supported = mount_tmpfs_with(&probe, "noswap").is_ok();
    if is_supported {
        let _ = rustix::mount::unmount(&probe, UnmountFlags::NOFOLLOW);
    }
    let _ = std::fs::remove_dir(&probe);
    is_supported
}

/// The path as the kernel writes it into the mount table; `None` when there is nothing at that path.
fn resolved(path: &Path) -> io::Result<Option<PathBuf>> {
    match path.canonicalize() {
        Ok(path) => Ok(Some(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn top_mount(path: &Path) -> io::Result<Option<Mount>> {
    Ok(mount_table()?.into_iter().rfind(|mount| mount.point == path))
}

/// The mount points as they were read, and the file they were read from: poll(2) reports on it each mount and unmount. Changed
/// attributes and a renamed directory above a mount point are not reported; the agent makes neither.
struct KnownPoints {
    table: File,
    points: Arc<[PathBuf]>,
}

/// Kept between calls: the kernel takes milliseconds to write a table of hundreds of lines, and each volume needs it.
static KNOWN: Mutex<Option<KnownPoints>> = Mutex::new(None);

fn points() -> io::Result<Arc<[PathBuf]>> {
    // Another call holds the lock while it reads the table; this one reads the table itself instead of waiting.
    let mut known = match KNOWN.try_lock() {
        Ok(known) => Some(known),
        Err(TryLockError::Poisoned(known)) => Some(known.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    // poll(2) reports a change once, so points that it has invalidated are removed before a reading that may fail.
    let before = known.as_deref_mut().and_then(Option::take);
    let now = match before {
        Some(before) if !has_changed(&before.table)? => before,
        Some(_) | None => {
            let Reading { table, lines, is_consistent } = read_table()?;
            let points: Arc<[PathBuf]> = parse(&lines).into_iter().map(|mount| mount.point).collect();
            if !is_consistent {
                return Ok(points);
            }
            KnownPoints { table, points }
        }
    };
    let points = now.points.clone();
    if let Some(known) = &mut known {
        **known = Some(now);
    }
    Ok(points)
}

pub(crate) fn mount_table() -> io::Result<Vec<Mount>> {
    Ok(parse(&read_table()?.lines))
}

struct Reading {
    table: File,
    lines: Vec<u8>,
    is_consistent: bool,
}

/// The kernel hands the table out in pieces, and a change between two pieces can hide a line. A reading without a change is
/// consistent; on a node whose mounts keep changing the last one is used.
fn read_table() -> io::Result<Reading> {
    const READINGS: usize = 5;
    let mut reading = Reading { table: File::open("/proc/self/mountinfo")?, lines: Vec::new(), is_consistent: false };
    for _ in 0..READINGS {
        reading.lines.clear();
        reading.table.rewind()?;
        reading.table.read_to_end(&mut reading.lines)?;
        reading.is_consistent = !has_changed(&reading.table)?;
        if reading.is_consistent {
            break;
        }
    }
    Ok(reading)
}

/// Something was mounted or unmounted since the file was opened, or since this was asked of it.
fn has_changed(table: &File) -> io::Result<bool> {
    let mut asked = [PollFd::new(table, PollFlags::PRI)];
    poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    Ok(asked[0].revents().intersects(PollFlags::PRI | PollFlags::ERR))
}

/// Lines as in proc(5): `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw`.
pub(crate) fn parse(table: &[u8]) -> Vec<Mount> {
    table.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let point = fields.get(4)?;
    // The number of optional fields varies; a lone dash ends them.
    let dash = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
    let fs_type = fields.get(dash + 1)?;
    let (major, minor) = std::str::from_utf8(fields.get(2)?).ok()?.split_once(':')?;
    Some(Mount {
        point: PathBuf::from(OsString::from_vec(unescape(point))),
        fs_type: String::from_utf8_lossy(fs_type).into_owned(),
        source: String::from_utf8_lossy(&unescape(fields.get(dash + 2)?)).into_owned(),
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        root: PathBuf::from(OsString::from_vec(unescape(fields.get(3)?))),
        options: String::from_utf8_lossy(fields.get(5)?).into_owned(),
        is_shared: fields[6..dash].iter().any(|field| field.starts_with(b"shared:")),
    })
}

/// Space, tab, newline and backslash are written as `\ooo`.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        match (byte, octal(after)) {
            (b'\\', Some(escaped)) => {
                plain.push(escaped);
                rest = &after[3..];
            }
            _ => {
                plain.push(byte);
                rest = after;
            }
        }
    }
    plain
}

fn octal(digits: &[u8]) -> Option<u8> {
    let digits = digits.get(..3)?;
    let value = digits.iter().try_fold(0u32, |value, digit| match digit {
        b'0'..=b'7' => Some(value * 8 + u32::from(digit - b'0')),
        _ => None,
    })?;
    u8::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing::{MountGuard, need_root};

    #[test]
    fn mountinfo_parser_handles_escapes_and_optional_fields() {
        let table = br"22 28 0:21 / /proc rw,nosuid shared:12 - proc proc rw
36 35 98:0 /mnt1 /var/lib/with\040space\134and\011tab rw master:1 propagate_from:2 - ext4 /dev/root rw
40 35 0:50 / /plain rw - tmpfs tmpfs rw,size=4k
short line
";
        let points: Vec<_> = parse(table).into_iter().map(|mount| (mount.point, mount.fs_type)).collect();
        let expected = [("/proc", "proc"), ("/var/lib/with space\\and\ttab", "ext4"), ("/plain", "tmpfs")];
        assert_eq!(points, expected.map(|(point, fs_type)| (PathBuf::from(point), fs_type.to_owned())));
    }

    #[test]
    fn a_directory_is_made_rshared_once() {
        need_root();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("root");
        fs::create_dir_all(path.join("plugins")).unwrap();
        let _guard = MountGuard(path.clone());
        let on =
            |path: &Path| mount_table().unwrap().into_iter().rfind(|mount| path.starts_with(&mount.point)).unwrap();
        // On a machine with shared propagation there is nothing to do.
        rustix::mount::mount_bind(&path, &path).unwrap();
        rustix::mount::mount_change(&path, MountPropagationFlags::PRIVATE).unwrap();
        assert!(!on(&path).is_shared);
        // Other tests mount at the same time.
        let mounts = || mounts_below(&path).unwrap().len();
        let before = mounts();
        make_rshared(&path).unwrap();
        make_rshared(&path).unwrap();
        assert!(on(&path.join("plugins")).is_shared);
        assert_eq!(mounts(), before + 1);
        rustix::mount::unmount(&path, UnmountFlags::empty()).unwrap();
    }

    #[test]
    fn invalid_escape_is_kept() {
        for plain in [r"\", r"a\04", r"\777", r"\08x"] {
            assert_eq!(unescape(plain.as_bytes()), plain.as_bytes());
        }
    }

    #[test]
    fn tmpfs_is_mounted_once_with_size_and_mode_and_unmounted() {
        need_root();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("with space");
        fs::create_dir(&path).unwrap();
        let _guard = MountGuard(path.clone());
        let mounter = Mounter::default();
        assert!(!is_mount_point(&path).unwrap());
        mounter.mount_tmpfs(&path, Some(64 * 1024), 0o1777).unwrap();
        assert!(is_mount_point(&path).unwrap());
        mounter.mount_tmpfs(&path, Some(64 * 1024), 0o1777).unwrap();
        assert_eq!(mounts_below(dir.path()).unwrap(), [path.canonicalize().unwrap()]);
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap()) & 0o7777, 0o1777);
        let too_much = fs::write(path.join("f"), vec![0; 128 * 1024]).unwrap_err();
        assert_eq!(too_much.kind(), io::ErrorKind::StorageFull);
        mounter.unmount(&path).unwrap();
        mounter.unmount(&path).unwrap();
        assert_eq!(mounts_below(dir.path()).unwrap(), Vec::<PathBuf>::new());
    }

    #[test]
    fn every_change_of_mounts_is_seen_at_once() {
        need_root();
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::thread::scope(|scope| {
            for number in 0..3 {
                let path = dir.join(number.to_string());
                scope.spawn(move || {
                    fs::create_dir(&path).unwrap();
                    let _guard = MountGuard(path.clone());
                    for _ in 0..50 {
                        rustix::mount::mount("tmpfs", &path, "tmpfs", MountFlags::empty(), None).unwrap();
                        assert_eq!(mounts_below(&path).unwrap(), std::slice::from_ref(&path));
                        rustix::mount::unmount(&path, UnmountFlags::empty()).unwrap();
                        assert_eq!(mounts_below(&path).unwrap(), Vec::<PathBuf>::new());
                    }
                });
            }
        });
    }

    #[test]
    fn test_for_noswap_leaves_nothing_behind() {
        need_root();
        let dir = tempfile::tempdir().unwrap();
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let numbers: Vec<u32> = release.split('.').take(2).filter_map(|part| part.parse().ok()).collect();
        if numbers >= vec![6, 4] {
            assert!(supports_noswap(dir.path()));
        }
        supports_noswap(dir.path());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(!supports_noswap(&dir.path().join("missing")));
    }

    #[test]
    fn mounts_are_found_behind_a_link_deepest_first() {
        need_root();
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap().join("real");
        let inner = real.join("inner");
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("link")).unwrap();
        let mounter = Mounter::default();
        let _outer_guard = MountGuard(real.clone());
        mounter.mount_tmpfs(&dir.path().join("link"), None, 0o755).unwrap();
        fs::create_dir(&inner).unwrap();
        let _inner_guard = MountGuard(inner.clone());
        rustix::mount::mount_bind(dir.path(), &inner).unwrap();
        assert_eq!(mounts_below(&dir.path().join("link")).unwrap(), [inner.clone(), real.clone()]);
        assert_eq!(mounts_below(&dir.path().join("link/inner")).unwrap(), [inner]);
        assert_eq!(mounts_below(&dir.path().join("nothing")).unwrap(), Vec::<PathBuf>::new());
        let busy = mounter.unmount(&real).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
    }
}
