//! A file system in memory: a tree, links, mounts, watches, and a device that can be full.
//!
//! Owns: the meaning of paths of the fake host. Never: time, faults, the port (`host.rs`).

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Component, Path, PathBuf},
};

use rubelet_host::{
    port::{DirEntry, FileIdentity, FileKind, MountPoint, Projected, Projection},
    stats::disk::Usage,
};
use tokio::sync::mpsc;

/// Linux' limit of links in a path.
const MAX_LINKS: u32 = 40;
const ELOOP: i32 = 40;

#[derive(Debug)]
pub(crate) struct Disk {
    nodes: BTreeMap<PathBuf, Node>,
    /// By mount point: the directory that a bind mount shows; a tmpfs shows itself.
    mounts: BTreeMap<PathBuf, PathBuf>,
    watches: Vec<Watch>,
    /// Files whose next write is a hint.
    write_watches: BTreeSet<PathBuf>,
    /// Those that were written to since the last hints.
    written: BTreeSet<PathBuf>,
    /// Directories changed since the last hints.
    changed: BTreeSet<PathBuf>,
    sockets_made: u64,
    /// The disk is full: no byte and no name can be added.
    pub full: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Directory {
        mode: u32,
    },
    File {
        content: Vec<u8>,
        mode: u32,
    },
    Link(PathBuf),
    Fifo,
    /// Its number differs from that of every other one.
    Socket(u64),
}

#[derive(Debug)]
struct Watch {
    dir: PathBuf,
    hints: mpsc::Sender<()>,
}

impl Default for Disk {
    fn default() -> Self {
        Disk {
            nodes: BTreeMap::from([(PathBuf::from("/"), Node::Directory { mode: 0o755 })]),
            mounts: BTreeMap::new(),
            watches: Vec::new(),
            write_watches: BTreeSet::new(),
            written: BTreeSet::new(),
            changed: BTreeSet::new(),
            sockets_made: 0,
            full: false,
        }
    }
}

impl Disk {
    pub(crate) fn list_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let dir = self.existing_dir(path)?;
        let children = self.below(&dir).filter(|(child, _)| child.parent() == Some(dir.as_path()));
        Ok(children.map(|(child, node)| DirEntry { name: file_name(child), kind: node.kind() }).collect())
    }

    /// Follows links; `None` if it does not exist.
    pub(crate) fn node(&self, path: &Path) -> io::Result<Option<&Node>> {
        Ok(self.nodes.get(&self.resolve(path)?))
    }

    pub(crate) fn make_dir(&mut self, path: &Path, mode: u32) -> io::Result<()> {
        let real = self.resolve(path)?;
        let missing: Vec<PathBuf> =
            real.ancestors().filter(|dir| !self.nodes.contains_key(*dir)).map(Path::to_path_buf).collect();
        if real.ancestors().any(|dir| self.nodes.get(dir).is_some_and(|node| node.kind() != FileKind::Directory)) {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        for dir in missing.into_iter().rev() {
            self.put(dir, Node::Directory { mode: 0o755 })?;
        }
        self.nodes.insert(real, Node::Directory { mode });
        Ok(())
    }

    pub(crate) fn write_file(&mut self, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
        let real = self.entry(path)?;
        if self.nodes.get(&real).is_some_and(|node| node.kind() == FileKind::Directory) {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        self.put(real, Node::File { content: content.to_vec(), mode })
    }

    /// As a process with the file open: it must exist.
    pub(crate) fn append(&mut self, path: &Path, text: &[u8]) -> io::Result<()> {
        match self.nodes.get_mut(path) {
            Some(Node::File { content, .. }) => {
                content.extend_from_slice(text);
                if self.write_watches.remove(path) {
                    self.written.insert(path.to_path_buf());
                }
                Ok(())
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// The next write to each of these is a hint.
    pub(crate) fn watch_writes(&mut self, paths: &[PathBuf]) {
        let files = paths.iter().filter(|path| matches!(self.nodes.get(*path), Some(Node::File { .. })));
        self.write_watches.extend(files.cloned());
    }

    pub(crate) fn has_writes(&self) -> bool {
        !self.written.is_empty()
    }

    pub(crate) fn take_writes(&mut self) -> BTreeSet<PathBuf> {
        std::mem::take(&mut self.written)
    }

    /// The agent died, and its watches with it.
    pub(crate) fn forget_write_watches(&mut self) {
        (self.write_watches, self.written) = (BTreeSet::new(), BTreeSet::new());
    }

    /// Never replaces a file.
    pub(crate) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let (from, to) = (self.entry(from)?, self.entry(to)?);
        if self.nodes.contains_key(&to) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let node = self.nodes.get(&from).cloned().ok_or(io::ErrorKind::NotFound)?;
        self.take(&from);
        if let Some(parent) = to.parent() {
            self.changed.insert(parent.to_path_buf());
        }
        self.nodes.insert(to, node);
        Ok(())
    }

    /// A log and its rotated files, the oldest first, the live one last.
    pub(crate) fn files_named(&self, live: &Path) -> Vec<(PathBuf, Vec<u8>)> {
        let (Some(dir), prefix) = (live.parent(), format!("{}.", file_name(live))) else { return Vec::new() };
        let is_rotated = |path: &Path| file_name(path).starts_with(&prefix);
        let mut found: Vec<_> = self.below(dir).filter(|(path, _)| is_rotated(path)).collect();
        found.extend(self.nodes.get_key_value(live));
        let content = |node: &Node| match node {
            Node::File { content, .. } => content.clone(),
            Node::Directory { .. } | Node::Link(_) | Node::Fifo | Node::Socket(_) => Vec::new(),
        };
        found.into_iter().map(|(path, node)| (path.clone(), content(node))).collect()
    }

    pub(crate) fn make_link(&mut self, target: &Path, link: &Path) -> io::Result<()> {
        let real = self.entry(link)?;
        self.put(real, Node::Link(target.to_path_buf()))
    }

    pub(crate) fn make_fifo(&mut self, path: &Path) -> io::Result<()> {
        let real = self.entry(path)?;
        self.put(real, Node::Fifo)
    }

    /// Replaces one that was there.
    pub(crate) fn make_socket(&mut self, path: &Path) -> io::Result<()> {
        let real = self.entry(path)?;
        self.sockets_made += 1;
        self.put(real, Node::Socket(self.sockets_made))
    }

    /// Only sockets are ever replaced by others that matter.
    pub(crate) fn identity(&self, path: &Path) -> io::Result<Option<FileIdentity>> {
        let number = |node: &Node| if let Node::Socket(number) = node { *number } else { 0 };
        let node = self.entry(path).ok().and_then(|real| self.nodes.get(&real));
        Ok(node.map(|node| FileIdentity { inode: number(node), ..FileIdentity::default() }))
    }

    /// A new hidden directory each time, as the real one; modes are not simulated.
    pub(crate) fn project(&mut self, path: &Path, projection: &Projection) -> io::Result<Projected> {
        let dir = self.existing_dir(path)?;
        let current = self.read_link(&dir.join("..data"))?.map(|name| dir.join(name));
        let shown = |disk: &Disk, hidden: &Path| -> BTreeMap<PathBuf, Vec<u8>> {
            let files = disk.below(hidden).filter_map(|(path, node)| match node {
                Node::File { content, .. } => Some((path.strip_prefix(hidden).ok()?.to_path_buf(), content.clone())),
                Node::Directory { .. } | Node::Link(_) | Node::Fifo | Node::Socket(_) => None,
            });
            files.collect()
        };
        let wanted: BTreeMap<_, _> =
            projection.files.iter().map(|(path, file)| (path.clone(), file.content.clone())).collect();
        if current.as_ref().is_some_and(|hidden| shown(self, hidden) == wanted) {
            return Ok(Projected::Unchanged);
        }
        let mut names = (0..).map(|number| dir.join(format!("{}{number}", projection.stamp)));
        let hidden = names.find(|name| !self.nodes.contains_key(name)).expect("numbers do not end");
        let written = self.fill(&dir, &hidden, projection);
        if written.is_err() {
            self.remove_tree(&hidden)?;
        } else if let Some(old) = current {
            self.remove_tree(&old)?;
        }
        written.map(|()| Projected::Written)
    }

    fn fill(&mut self, dir: &Path, hidden: &Path, projection: &Projection) -> io::Result<()> {
        self.make_dir(hidden, 0o755)?;
        for (path, file) in &projection.files {
            let path = hidden.join(path);
            self.make_dir(path.parent().unwrap_or(hidden), 0o755)?;
            self.write_file(&path, &file.content, file.mode)?;
        }
        let names: BTreeSet<_> = projection.files.keys().filter_map(|path| path.iter().next()).collect();
        self.make_link(Path::new(&file_name(hidden)), &dir.join("..data"))?;
        for name in names {
            self.make_link(&Path::new("..data").join(name), &dir.join(name))?;
        }
        Ok(())
    }

    pub(crate) fn read_link(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        match self.nodes.get(&self.entry(path)?) {
            Some(Node::Link(target)) => Ok(Some(target.clone())),
            _ => Ok(None),
        }
    }

    pub(crate) fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        let Ok(real) = self.entry(path) else { return Ok(()) };
        match self.nodes.get(&real) {
            None => Ok(()),
            Some(Node::Directory { .. }) => Err(io::ErrorKind::IsADirectory.into()),
            Some(_) => {
                self.take(&real);
                Ok(())
            }
        }
    }

    pub(crate) fn remove_dir(&mut self, path: &Path, own: &[&str]) -> io::Result<()> {
        let Ok(real) = self.entry(path) else { return Ok(()) };
        let is_own = |(path, node): (&PathBuf, &Node)| {
            matches!(node, Node::File { .. })
                && path.parent() == Some(&*real)
                && path.file_name().is_some_and(|name| own.iter().any(|own| name == *own))
        };
        if self.below(&real).all(is_own) {
            self.remove_tree(path)
        } else {
            Err(io::ErrorKind::DirectoryNotEmpty.into())
        }
    }

    pub(crate) fn remove_tree(&mut self, path: &Path) -> io::Result<()> {
        let Ok(real) = self.entry(path) else { return Ok(()) };
        if let Some(mount) = self.mounts.keys().find(|mount| mount.starts_with(&real)) {
            let message = format!("{} is a mount point", mount.display());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, message));
        }
        let doomed: Vec<PathBuf> = self.below(&real).map(|(path, _)| path.clone()).collect();
        for path in doomed.iter().rev() {
            self.take(path);
        }
        self.take(&real);
        Ok(())
    }

    pub(crate) fn mount_tmpfs(&mut self, path: &Path) -> io::Result<()> {
        let real = self.existing_dir(path)?;
        self.mounts.insert(real.clone(), real);
        Ok(())
    }

    pub(crate) fn bind(&mut self, source: &Path, target: &Path) -> io::Result<()> {
        let (source, target) = (self.existing_dir(source)?, self.existing_dir(target)?);
        self.mounts.insert(target, source);
        Ok(())
    }

    /// What the files of a directory and those below it hold.
    pub(crate) fn usage(&self, path: &Path) -> io::Result<Usage> {
        let dir = self.existing_dir(path)?;
        let sizes = self.below(&dir).map(|(_, node)| match node {
            Node::File { content, .. } => Usage { bytes: content.len() as u64, inodes: 1 },
            Node::Directory { .. } | Node::Link(_) | Node::Fifo | Node::Socket(_) => Usage { bytes: 0, inodes: 1 },
        });
        Ok(sizes.fold(Usage::default(), Usage::saturating_add))
    }

    /// Where the path is, links and bind mounts followed.
    pub(crate) fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        let real = self.resolve(path)?;
        let mount = real.ancestors().find_map(|dir| Some((dir, self.mounts.get(dir)?)));
        let bound = mount.and_then(|(point, source)| Some(source.join(real.strip_prefix(point).ok()?)));
        Ok(bound.unwrap_or(real))
    }

    /// What is mounted exactly there: the directory that it shows.
    pub(crate) fn mounted_at(&self, point: &Path) -> Option<&Path> {
        let real = self.resolve(point).ok()?;
        self.mounts.get(&real).map(PathBuf::as_path)
    }

    /// The mount points that show this directory.
    pub(crate) fn mounts_of<'a>(&'a self, source: &'a Path) -> impl Iterator<Item = &'a PathBuf> {
        self.mounts.iter().filter(move |(_, shown)| shown.as_path() == source).map(|(point, _)| point)
    }

    /// The mount points that show a directory in this one, each with what it shows.
    pub(crate) fn mounts_in<'a>(&'a self, dir: &'a Path) -> impl Iterator<Item = (&'a Path, &'a Path)> {
        let mounts = self.mounts.iter().filter(move |(_, shown)| shown.parent() == Some(dir));
        mounts.map(|(point, shown)| (point.as_path(), shown.as_path()))
    }

    pub(crate) fn mounts_below(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let real = self.resolve(path)?;
        Ok(self.mounts.keys().rev().filter(|mount| mount.starts_with(&real)).cloned().collect())
    }

    pub(crate) fn mount_points(&self) -> Vec<MountPoint> {
        let shown = |(path, source): (&PathBuf, &PathBuf)| MountPoint {
            path: path.clone(),
            fs_type: "simulated".to_owned(),
            source: source.display().to_string(),
            device: (0, 0),
            root: source.clone(),
            options: "rw".to_owned(),
        };
        self.mounts.iter().map(shown).collect()
    }

    /// Unmounting a tmpfs loses its content.
    pub(crate) fn unmount(&mut self, path: &Path) -> io::Result<()> {
        let real = self.resolve(path)?;
        if self.mounts.remove(&real).is_none() {
            return Ok(());
        }
        let gone: Vec<PathBuf> = self.below(&real).map(|(path, _)| path.clone()).collect();
        for path in gone {
            self.nodes.remove(&path);
        }
        Ok(())
    }

    /// A reboot: nothing is mounted, and memory is lost.
    pub(crate) fn forget_mounts(&mut self) {
        for mount in self.mounts.clone().keys().rev() {
            self.unmount(mount).expect("a mount point resolves");
        }
        self.nodes.retain(|path, _| !path.starts_with("/run") || path == Path::new("/run"));
    }

    pub(crate) fn watch(&mut self, path: &Path) -> io::Result<mpsc::Receiver<()>> {
        let dir = self.existing_dir(path)?;
        // One hint is enough.
        let (hints, receiver) = mpsc::channel(1);
        self.watches.push(Watch { dir, hints });
        Ok(receiver)
    }

    /// The directories changed since the last call, for `tell`.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<PathBuf> {
        std::mem::take(&mut self.changed)
    }

    pub(crate) fn tell(&mut self, dir: &Path) {
        self.watches.retain(|watch| !watch.hints.is_closed());
        for watch in self.watches.iter().filter(|watch| watch.dir == dir) {
            // A full channel holds a hint already.
            let _ = watch.hints.try_send(());
        }
    }

    /// Every path at or below `path`, and every mount: the leftovers when all should be gone.
    pub(crate) fn leftovers(&self, path: &Path) -> Vec<PathBuf> {
        let mut left: Vec<PathBuf> = self.below(path).map(|(path, _)| path.clone()).collect();
        left.extend(self.mounts.keys().filter(|mount| mount.starts_with(path)).cloned());
        left
    }

    fn put(&mut self, path: PathBuf, node: Node) -> io::Result<()> {
        if self.full {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if let Some(parent) = path.parent() {
            self.changed.insert(parent.to_path_buf());
        }
        self.nodes.insert(path, node);
        Ok(())
    }

    fn take(&mut self, path: &Path) {
        if self.nodes.remove(path).is_some() {
            if let Some(parent) = path.parent() {
                self.changed.insert(parent.to_path_buf());
            }
            self.watches.retain(|watch| watch.dir != path);
            self.write_watches.remove(path);
        }
    }

    fn below<'a>(&'a self, dir: &'a Path) -> impl Iterator<Item = (&'a PathBuf, &'a Node)> {
        let at_or_below = self.nodes.range(dir.to_path_buf()..).take_while(move |(path, _)| path.starts_with(dir));
        at_or_below.filter(move |(path, _)| path.as_path() != dir)
    }

    fn existing_dir(&self, path: &Path) -> io::Result<PathBuf> {
        let real = self.resolve(path)?;
        match self.nodes.get(&real) {
            Some(Node::Directory { .. }) => Ok(real),
            Some(_) => Err(io::ErrorKind::NotADirectory.into()),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// The resolved path of a name: links in its parents are followed, the name itself not.
    fn entry(&self, path: &Path) -> io::Result<PathBuf> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Ok(path.to_path_buf());
        };
        Ok(self.existing_dir(parent)?.join(name))
    }

    /// Follows every link; missing components are kept as written.
    fn resolve(&self, path: &Path) -> io::Result<PathBuf> {
        let mut real = PathBuf::from("/");
        let mut ahead: Vec<PathBuf> = parts(path);
        let mut links = 0;
        while let Some(part) = ahead.pop() {
            if part == Path::new("..") {
                real.pop();
                continue;
            }
            let next = real.join(&part);
            let Some(Node::Link(target)) = self.nodes.get(&next) else {
                real = next;
                continue;
            };
            links += 1;
            if links > MAX_LINKS {
                return Err(io::Error::from_raw_os_error(ELOOP));
            }
            if target.is_absolute() {
                real = PathBuf::from("/");
            }
            ahead.extend(parts(target));
        }
        Ok(real)
    }
}

impl Node {
    pub(crate) fn kind(&self) -> FileKind {
        match self {
            Node::Directory { .. } => FileKind::Directory,
            Node::File { .. } => FileKind::File,
            Node::Link(_) => FileKind::Symlink,
            Node::Fifo => FileKind::Fifo,
            Node::Socket(_) => FileKind::Socket,
        }
    }
}

/// The components of a path, last first, ready to be popped.
fn parts(path: &Path) -> Vec<PathBuf> {
    let components = path.components().rev();
    components
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| PathBuf::from(part.as_os_str()))
        .collect()
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_in_a_path_are_followed_and_a_loop_ends() {
        let mut disk = Disk::default();
        disk.make_dir(Path::new("/real/a"), 0o755).unwrap();
        disk.make_link(Path::new("/real"), Path::new("/link")).unwrap();
        disk.write_file(Path::new("/link/a/file"), b"x", 0o644).unwrap();
        assert!(disk.node(Path::new("/real/a/file")).unwrap().is_some());
        disk.make_link(Path::new("loop"), Path::new("/loop")).unwrap();
        assert!(disk.node(Path::new("/loop")).is_err());
    }

    #[test]
    fn a_tree_with_a_mount_below_it_stays() {
        let mut disk = Disk::default();
        disk.make_dir(Path::new("/a/b"), 0o755).unwrap();
        disk.mount_tmpfs(Path::new("/a/b")).unwrap();
        assert!(disk.remove_tree(Path::new("/a")).is_err());
        disk.unmount(Path::new("/a/b")).unwrap();
        disk.remove_tree(Path::new("/a")).unwrap();
        assert_eq!(disk.leftovers(Path::new("/a")), Vec::<PathBuf>::new());
    }

    #[test]
    fn full_disk_rejects_writes_but_allows_removal() {
        let mut disk = Disk::default();
        disk.write_file(Path::new("/f"), b"x", 0o644).unwrap();
        disk.full = true;
        assert!(disk.write_file(Path::new("/f"), b"y", 0o644).is_err());
        assert!(disk.make_dir(Path::new("/d"), 0o755).is_err());
        disk.remove_file(Path::new("/f")).unwrap();
    }

    #[test]
    fn a_watch_ends_with_its_directory() {
        let mut disk = Disk::default();
        disk.make_dir(Path::new("/m"), 0o755).unwrap();
        let mut hints = disk.watch(Path::new("/m")).unwrap();
        disk.write_file(Path::new("/m/a"), b"", 0o644).unwrap();
        assert_eq!(disk.take_changed(), BTreeSet::from([PathBuf::from("/"), PathBuf::from("/m")]));
        disk.tell(Path::new("/m"));
        assert_eq!(hints.try_recv(), Ok(()));
        disk.remove_tree(Path::new("/m")).unwrap();
        assert_eq!(hints.try_recv(), Err(mpsc::error::TryRecvError::Disconnected));
    }
}
