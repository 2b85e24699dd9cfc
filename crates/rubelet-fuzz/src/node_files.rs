//! Files of the node: kernel tables, configuration, systemd's socket, variables of containers.
//!
//! Owns: that what is read can be written and read again, and that figures agree with each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use rubelet::fuzzing;
use rubelet_core::{
    config::{Draft, Host},
    container::environment::files::values,
};
use rubelet_host::{
    fuzzing::{mount_table as mounts_of, systemd_replies},
    mount::Mount,
    stats::{
        Reader,
        cgroup::{CgroupStats, Extent, Mounts, Trees},
    },
};

use crate::choice;

/// An empty directory, in memory if the machine has such a place.
pub(crate) fn scratch_dir(name: &str) -> PathBuf {
    thread_local! {
        static SCRATCH: tempfile::TempDir = {
            let memory = Path::new("/dev/shm");
            let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
            tempfile::Builder::new().prefix("rubelet-fuzz").tempdir_in(place).expect("a directory of our own")
        };
    }
    SCRATCH.with(|dir| {
        let dir = dir.path().join(name);
        if dir.exists() {
            fs::remove_dir_all(&dir).expect("a directory of our own");
        }
        fs::create_dir(&dir).expect("a directory of our own");
        dir
    })
}

pub(crate) fn mount_table(data: &[u8]) -> Option<()> {
    let mounts = mounts_of(data);
    let written: Vec<u8> = mounts.iter().flat_map(line).collect();
    assert_eq!(mounts_of(&written), mounts);
    assert!(mounts.len() <= data.split(|byte| *byte == b'\n').count());
    (!mounts.is_empty()).then_some(())
}

fn line(mount: &Mount) -> Vec<u8> {
    let Mount { point, fs_type, source, major, minor, root, is_shared, options } = mount;
    let shared = if *is_shared { " shared:1" } else { "" };
    let mut line = format!("36 35 {major}:{minor} ").into_bytes();
    line.extend(escaped(root.as_os_str().as_bytes()));
    line.push(b' ');
    line.extend(escaped(point.as_os_str().as_bytes()));
    line.extend(format!(" {options}{shared} - {fs_type} ").into_bytes());
    line.extend(escaped(source.as_bytes()));
    line.extend(b" rw\n");
    line
}

/// As the kernel writes a path.
fn escaped(text: &[u8]) -> Vec<u8> {
    let escape = |byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        byte => vec![*byte],
    };
    text.iter().flat_map(escape).collect()
}

/// The files of a cgroup, each after a line with `#` and its name; an odd first byte is version 1.
pub(crate) fn cgroup_files(data: &[u8]) -> Option<()> {
    let (version, text) = choice(data);
    let tree = scratch_dir("cgroup");
    for file in text.split(|byte| *byte == b'#') {
        let end = file.iter().position(|byte| *byte == b'\n').unwrap_or(file.len());
        let (name, content) = (&file[..end], &file[(end + 1).min(file.len())..]);
        let is_name = |byte: &u8| byte.is_ascii_lowercase() || *byte == b'_' || *byte == b'.';
        let name = std::str::from_utf8(name.trim_ascii()).unwrap_or_default();
        // Neither hidden nor a path.
        if !name.is_empty() && name.len() < 64 && !name.starts_with('.') && name.bytes().all(|byte| is_name(&byte)) {
            fs::write(tree.join(name), content).expect("a file of our own");
        }
    }
    let trees = match version % 2 {
        0 => Trees::V2(tree),
        _ => {
            let all = tree.with_file_name("cpu,cpuacct,memory,pids,blkio");
            let _ = fs::remove_dir_all(&all);
            fs::rename(&tree, &all).expect("a directory of our own");
            Trees::V1(Mounts::new(std::iter::once(all)))
        }
    };
    let mut reader = Reader::default();
    for extent in [Extent::Usage, Extent::All] {
        if let Some(stats) = trees.read("/", extent, &mut reader) {
            check(&stats);
        }
    }
    assert!(trees.processes("/", &mut reader).iter().all(|pid| *pid != 0));
    let _ = trees.of_process(&String::from_utf8_lossy(text));
    trees.cpu_nanos("/", &mut reader).map(drop)
}

fn check(stats: &CgroupStats) {
    if let Some(memory) = &stats.memory {
        assert!(memory.working_set_bytes <= memory.usage_bytes);
        assert!(memory.limit_bytes.is_none_or(|bytes| bytes <= 1 << 62));
    }
}

/// A systemd that lets us in and then sends these bytes.
pub(crate) fn systemd(data: &[u8]) -> Option<()> {
    let stream = [&b"OK 1234\r\n"[..], data].concat();
    systemd_replies(&stream).ok()?;
    // At least two replies and a signal, with 16 bytes of head each.
    assert!(data.len() >= 48);
    Some(())
}

pub(crate) fn kubelet_config(data: &[u8]) -> Option<()> {
    let document = fuzzing::yaml(data)?;
    let no_gates = BTreeMap::new();
    let draft = Draft::from_file(Path::new("/var/lib/kubelet/config.yaml"), &document, &no_gates).ok()?;
    let config = draft.config.clone();
    // A drop-in directory without files changes nothing.
    let merged = draft.drop_ins(&[], &no_gates).map_err(|problems| format!("{problems:?}"));
    let merged = merged.expect("what is shown can be read");
    assert_eq!(serde_json::to_value(&merged.config).ok(), serde_json::to_value(&config).ok());
    for host in [Host::CgroupV1, Host::CgroupV2] {
        if let Err(problems) = merged.clone().check(host) {
            assert!(!problems.is_empty());
        }
    }
    Some(())
}

/// Variables of a file: those of the first line, out of the rest.
pub(crate) fn env_file(data: &[u8]) -> Option<()> {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let names = String::from_utf8_lossy(&data[..end]);
    let file = &data[(end + 1).min(data.len())..];
    let keys: BTreeSet<&str> = names.split(' ').collect();
    let all = values(file, &keys);
    assert!(all.keys().eq(keys.iter()));
    for (key, found) in &all {
        // Each as if it were read alone.
        assert_eq!(values(file, &BTreeSet::from([*key])).get(key), Some(found));
        assert!(found.as_ref().is_err() || found.as_ref().is_ok_and(|value| value.len() <= file.len()));
    }
    all.values().any(|found| found.as_ref().is_ok_and(|value| !value.is_empty())).then_some(())
}
