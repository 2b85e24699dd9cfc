//! Loop devices over a file.
//!
//! Owns: finding those of a file, and releasing them. Never: makes one.
//! Upstream: `util/volumepathhandler` `GetLoopDevice`, `RemoveLoopDevice`.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use rustix::{
    io::Errno,
    ioctl::{NoArg, Opcode, ioctl},
};

const BLOCK_DEVICES: &str = "/sys/block";
/// The kernel's number for "release the file".
const LOOP_CLR_FD: Opcode = 0x4C01;

/// Releases every loop device over the file; none is no error.
pub(crate) fn release(file: &Path) -> io::Result<()> {
    for entry in fs::read_dir(BLOCK_DEVICES)? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with("loop") {
            continue;
        }
        // Without a file it has no such attribute.
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let backing = backing.trim_end_matches('\n');
        // So it reads once the file is deleted, or the device behind it is gone.
        let backing = backing.strip_suffix(" (deleted)").unwrap_or(backing);
        if Path::new(backing) == file {
            release_device(&Path::new("/dev").join(name))?;
        }
    }
    Ok(())
}

#[expect(unsafe_code, reason = "rustix has no call of its own for this request")]
fn release_device(device: &Path) -> io::Result<()> {
    let device = File::open(device)?;
    // SAFETY: the request takes no argument, and a loop device knows it.
    let released = unsafe { ioctl(&device, NoArg::<LOOP_CLR_FD>::new()) };
    match released {
        // Released by another process.
        Ok(()) | Err(Errno::NXIO) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The backing files of all loop devices.
    fn backing_files() -> Vec<String> {
        let entries = fs::read_dir(BLOCK_DEVICES).unwrap().flatten();
        entries.filter_map(|entry| fs::read_to_string(entry.path().join("loop/backing_file")).ok()).collect()
    }

    #[test]
    fn loop_device_over_a_file_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().canonicalize().unwrap().join("disk");
        File::create(&file).unwrap().set_len(1 << 20).unwrap();
        release(&file).unwrap();
        let made = Command::new("losetup").arg("--find").arg(&file).status().unwrap();
        if !made.success() {
            return eprintln!("skipped: this machine lets nobody make loop devices");
        }
        let has_it = || backing_files().iter().any(|backing| Path::new(backing.trim_end()) == file);
        assert!(has_it());
        release(&file).unwrap();
        assert!(!has_it());
    }
}
