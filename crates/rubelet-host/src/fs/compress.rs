//! Compression of a file in its place.
//!
//! Owns: that the file or its compressed form is whole at any moment, whenever the agent dies. Never: follows a link.
//! Upstream: `compressLog`.

use std::{
    ffi::OsString,
    fs::{File, Permissions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
};

use flate2::{Compression, write::GzEncoder};
use rustix::{
    fs::{AtFlags, Mode, OFlags},
    io::Errno,
};

use super::{
    beneath::{NO_LINKS, open_parent},
    regular, resolve,
};
use crate::port::ReadError;

/// Between two questions whether to go on.
const BLOCK_BYTES: usize = 256 * 1024;

/// Writes `<file>.tmp`, renames it to `<file>.gz` and removes the file. It is an error if `go_on` says no.
pub fn compress_beneath(root: &Path, path: &Path, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<()> {
    let (dir, name) = open_parent(root, path)?;
    let with = |suffix: &str| [name, suffix.as_ref()].into_iter().collect::<OsString>();
    let (temporary, compressed) = (with(".tmp"), with(".gz"));
    let source = match regular(&File::from(resolve::open(&dir, name, OFlags::PATH, NO_LINKS)?)) {
        Ok(source) => source,
        Err(ReadError::Io(error)) => return Err(error),
        Err(other) => return Err(io::Error::new(io::ErrorKind::InvalidInput, other)),
    };
    // Left over by a compression that was cut off.
    remove(&dir, &temporary)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target = File::from(rustix::fs::openat(&dir, &temporary, flags, Mode::from_raw_mode(0o600))?);
    let done =
        write(source, target, go_on).and_then(|()| Ok(rustix::fs::renameat(&dir, &temporary, &dir, &compressed)?));
    if done.is_err() {
        // The first error is the relevant one.
        let _ = remove(&dir, &temporary);
        return done;
    }
    remove(&dir, name)
}

fn write(mut source: File, target: File, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<()> {
    let mode = source.metadata()?.mode() & 0o777;
    let mut encoder = GzEncoder::new(target, Compression::default());
    let mut block = vec![0; BLOCK_BYTES];
    loop {
        go_on()?;
        match source.read(&mut block)? {
            0 => return encoder.finish()?.set_permissions(Permissions::from_mode(mode)),
            read => encoder.write_all(&block[..read])?,
        }
    }
}

fn remove(dir: impl std::os::fd::AsFd, name: impl rustix::path::Arg) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use flate2::read::GzDecoder;

    use super::*;

    const GO_ON: &dyn Fn() -> io::Result<()> = &|| Ok(());

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn file_is_replaced_by_its_compressed_form() {
        let dir = tempfile::tempdir().unwrap();
        let (root, path) = (dir.path(), dir.path().join("sub/0.log.1"));
        fs::create_dir(root.join("sub")).unwrap();
        let text = "a line of the log\n".repeat(100_000);
        fs::write(&path, &text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        fs::write(root.join("sub/0.log.1.tmp"), "of an earlier attempt").unwrap();
        compress_beneath(root, &path, GO_ON).unwrap();
        assert_eq!(names(&root.join("sub")), ["0.log.1.gz"]);
        let compressed = File::open(root.join("sub/0.log.1.gz")).unwrap();
        assert_eq!(compressed.metadata().unwrap().mode() & 0o777, 0o640);
        let mut found = String::new();
        GzDecoder::new(compressed).read_to_string(&mut found).unwrap();
        assert!(found == text);
    }

    #[test]
    fn abandoned_compression_leaves_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log.1");
        fs::write(&path, vec![7; 3 * BLOCK_BYTES]).unwrap();
        let steps = std::cell::Cell::new(0);
        let go_on = || {
            steps.set(steps.get() + 1);
            if steps.get() > 2 { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        };
        assert_eq!(compress_beneath(dir.path(), &path, &go_on).unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert_eq!(names(dir.path()), ["0.log.1"]);
    }

    #[test]
    fn links_are_neither_read_nor_written_through() {
        let outside = tempfile::tempdir().unwrap();
        let root = outside.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(outside.path().join("secret"), "secret").unwrap();
        symlink("../secret", root.join("link")).unwrap();
        compress_beneath(&root, &root.join("link"), GO_ON).unwrap_err();
        fs::write(root.join("file"), "log").unwrap();
        symlink("../secret", root.join("file.tmp")).unwrap();
        compress_beneath(&root, &root.join("file"), GO_ON).unwrap();
        assert_eq!(fs::read_to_string(outside.path().join("secret")).unwrap(), "secret");
        assert_eq!(names(&root), ["file.gz", "link"]);
    }
}
