//! Mounting and formatting by the node's programs: their arguments, and what their answers mean.
//!
//! Owns: command lines of mount, mkfs, fsck, blkid and of what makes file systems larger, and the decisions in between. Never: runs anything.
//! Upstream: `mount-utils` (`SafeFormatAndMount`, `MakeMountArgs`), `JoinMountOptions`.

use std::{collections::BTreeSet, path::Path};

/// Where a volume does not name its file system.
pub const DEFAULT_FS_TYPE: &str = "ext4";

/// Those of the user and those of the plugin, each once, sorted.
pub fn join_options<'a>(user: &'a [String], own: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let user = user.iter().map(String::as_str).filter(|option| !option.is_empty());
    let all: BTreeSet<&str> = user.chain(own).collect();
    all.into_iter().map(str::to_owned).collect()
}

/// Of a bind mount into a pod's directory; none if it has those of what is bound.
pub fn bind_options(user: &[String], read_only: bool) -> Vec<String> {
    join_options(user, read_only.then_some("ro"))
}

/// Of the remount that gives a bind mount its own options. `current` are those of the mount, of which it keeps what protects.
pub fn remount_options(own: &[String], current: &str) -> Vec<String> {
    const KEPT: [&str; 7] = ["ro", "nodev", "noexec", "nosuid", "noatime", "relatime", "nodiratime"];
    let kept = current.split(',').filter(|option| KEPT.contains(option));
    let own = own.iter().map(String::as_str).filter(|option| *option != "bind");
    let all = ["bind", "remount"].into_iter().chain(own).chain(kept);
    let mut seen = BTreeSet::new();
    all.filter(|option| seen.insert(*option)).map(str::to_owned).collect()
}

/// The error of a format, with upstream's words.
pub fn format_failure(
    device: &str,
    fs_type: &str,
    target: &Path,
    options: &[String],
    error: &str,
    output: &str,
) -> String {
    let (target, options) = (target.display().to_string(), options.join(","));
    format!(
        "format of disk {device:?} failed: type:({fs_type:?}) target:({target:?}) options:({options:?}) errcode:({error}) output:({output}) "
    )
}

/// Of mount. An empty type leaves it to the kernel.
pub fn mount_arguments(source: &str, target: &Path, fs_type: &str, options: &[String]) -> Vec<String> {
    let mut arguments = Vec::new();
    if !fs_type.is_empty() {
        arguments.extend(["-t".to_owned(), fs_type.to_owned()]);
    }
    if !options.is_empty() {
        arguments.extend(["-o".to_owned(), options.join(",")]);
    }
    if !source.is_empty() {
        arguments.push(source.to_owned());
    }
    arguments.push(target.display().to_string());
    arguments
}

/// Of blkid, which looks at the device itself.
pub fn blkid_arguments(device: &str) -> Vec<String> {
    ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", device].map(str::to_owned).to_vec()
}

/// Of `mkfs.<type>`.
pub fn mkfs_arguments(fs_type: &str, device: &str) -> Vec<String> {
    let flags: &[&str] = match fs_type {
        "ext3" | "ext4" => &["-F", "-m0"],
        "xfs" => &["-f"],
        _ => &[],
    };
    flags.iter().copied().chain([device]).map(str::to_owned).collect()
}

/// What a device holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskFormat {
    Unformatted,
    /// The type of its file system, or words for what must not be formatted.
    Formatted(String),
}

/// blkid's exit code and output.
pub fn disk_format(exit: i32, output: &str) -> Result<DiskFormat, String> {
    /// It found nothing.
    const NOTHING_FOUND: i32 = 2;
    if exit == NOTHING_FOUND {
        return Ok(DiskFormat::Unformatted);
    }
    if exit != 0 {
        return Err(format!("exit status {exit}"));
    }
    let (mut fs_type, mut has_partitions) = ("", false);
    for line in output.lines().filter(|line| !line.is_empty()) {
        match line.split('=').collect::<Vec<_>>()[..] {
            ["TYPE", value] => fs_type = value,
            ["PTTYPE", value] => has_partitions |= !value.is_empty(),
            [_, _] => {}
            _ => return Err(format!("blkid returns invalid output: {output}")),
        }
    }
    Ok(match (has_partitions, fs_type) {
        (true, _) => DiskFormat::Formatted("unknown data, probably partitions".to_owned()),
        (false, "") => DiskFormat::Unformatted,
        (false, fs_type) => DiskFormat::Formatted(fs_type.to_owned()),
    })
}

/// The program that makes the file system on a device as large as it, and its arguments. `None` for an empty device, whose file
/// system will be as large from the start.
pub fn growth(
    device: &str,
    format: &DiskFormat,
    mounted: &Path,
) -> Result<Option<(&'static str, Vec<String>)>, String> {
    let DiskFormat::Formatted(fs_type) = format else { return Ok(None) };
    let mounted = mounted.display().to_string();
    Ok(Some(match &**fs_type {
        "ext3" | "ext4" => ("resize2fs", vec![device.to_owned()]),
        "xfs" => ("xfs_growfs", vec!["-d".to_owned(), mounted]),
        "btrfs" => ("btrfs", ["filesystem", "resize", "max", &mounted].map(str::to_owned).to_vec()),
        other => {
            return Err(format!(
                "ResizeFS.Resize - resize of format {other} is not supported for device {device} mounted at {mounted}"
            ));
        }
    }))
}

/// What comes before a device is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Preparation {
    Format,
    Check,
    Nothing,
}

/// How to prepare a device, or why it must not be mounted.
pub fn preparation(device: &str, format: &DiskFormat, options: &[String]) -> Result<Preparation, String> {
    let is_read_only = options.iter().any(|option| option == "ro");
    match (format, is_read_only) {
        (DiskFormat::Unformatted, true) => {
            Err(format!("cannot mount unformatted disk {device} as we are manipulating it in read-only mode"))
        }
        (DiskFormat::Unformatted, false) => Ok(Preparation::Format),
        (DiskFormat::Formatted(_), true) => Ok(Preparation::Nothing),
        (DiskFormat::Formatted(_), false) => Ok(Preparation::Check),
    }
}

/// Why a device must not be mounted after `fsck -a`: it has errors that were not corrected. As upstream, a check that failed
/// in any other way does not matter.
pub fn check_failure(device: &str, exit: i32, output: &str) -> Option<String> {
    const ERRORS_UNCORRECTED: i32 = 4;
    (exit == ERRORS_UNCORRECTED)
        .then(|| format!("'fsck' found errors on device {device} but could not correct them: {output}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_system_grows_by_its_own_program() {
        let growth = |fs_type: &str| {
            let format = DiskFormat::Formatted(fs_type.to_owned());
            growth("/dev/b", &format, Path::new("/m"))
                .map(|found| found.map(|(name, args)| format!("{name} {}", args.join(" "))))
        };
        assert_eq!(growth("ext4"), Ok(Some("resize2fs /dev/b".to_owned())));
        assert_eq!(growth("xfs"), Ok(Some("xfs_growfs -d /m".to_owned())));
        assert_eq!(growth("btrfs"), Ok(Some("btrfs filesystem resize max /m".to_owned())));
        let refused = "ResizeFS.Resize - resize of format vfat is not supported for device /dev/b mounted at /m";
        assert_eq!(growth("vfat"), Err(refused.to_owned()));
        assert_eq!(super::growth("/dev/b", &DiskFormat::Unformatted, Path::new("/m")), Ok(None));
    }

    #[test]
    fn device_is_formatted_only_if_it_is_empty_and_writable() {
        let (read_only, writable) = (["ro".to_owned()], ["noatime".to_owned()]);
        let prepared = |exit: i32, output: &str, options: &[String]| {
            let format = disk_format(exit, output)?;
            preparation("/dev/b", &format, options).map(|preparation| format!("{preparation:?}"))
        };
        let lines = [
            prepared(2, "", &writable),
            prepared(2, "", &read_only),
            prepared(0, "DEVNAME=/dev/b\nTYPE=ext4\n", &writable),
            prepared(0, "DEVNAME=/dev/b\nTYPE=ext4\n", &read_only),
            prepared(0, "DEVNAME=/dev/b\nPTTYPE=dos\n", &writable),
            prepared(0, "\n", &writable),
            prepared(0, "broken", &writable),
            prepared(8, "ambivalent result", &writable),
        ];
        let lines: Vec<_> = lines.into_iter().map(|line| line.unwrap_or_else(|error| error)).collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        Format
        cannot mount unformatted disk /dev/b as we are manipulating it in read-only mode
        Check
        Nothing
        Check
        Format
        blkid returns invalid output: broken
        exit status 8
        ");
        assert_eq!(check_failure("/dev/b", 1, ""), None);
        assert_eq!(check_failure("/dev/b", 8, ""), None);
        assert!(check_failure("/dev/b", 4, "bad").is_some_and(|why| why.ends_with("could not correct them: bad")));
    }

    #[test]
    fn arguments_are_those_of_upstream() {
        let options = join_options(&["b".to_owned(), String::new(), "a".to_owned()], ["ro", "a"]);
        let lines = [
            mount_arguments("s:/p", Path::new("/t"), "nfs", &options),
            mount_arguments("", Path::new("/t"), "", &[]),
            mkfs_arguments("ext4", "/dev/b"),
            mkfs_arguments("xfs", "/dev/b"),
            mkfs_arguments("btrfs", "/dev/b"),
            blkid_arguments("/dev/b"),
            remount_options(&bind_options(&["noexec".to_owned()], true), "rw,nosuid,nodev,noexec"),
        ];
        insta::assert_snapshot!(lines.map(|line| line.join(" ")).join("\n"), @r"
        -t nfs -o a,b,ro s:/p /t
        /t
        -F -m0 /dev/b
        -f /dev/b
        /dev/b
        -p -s TYPE -s PTTYPE -o export /dev/b
        bind remount noexec ro nosuid nodev
        ");
    }
}
