//! Container logs: their sizes, rotation and compression.
//!
//! Owns: the order of a rotation, and the names of rotated files: `0.log.20261117-215801`, local time, later with `.gz`. No
//! line is lost: until the runtime has opened a new file it writes to the renamed one, and that one is not compressed
//! before the next rotation. Never: overwrites a file, follows a link.
//! Upstream: `container_log_manager.go`.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::{civil::DateTime, tz::TimeZone};
use rubelet_core::{
    effect::{EffectError, Facts},
    op::LogPlace,
};

use super::failure;
use crate::world::World;

const COMPRESSED: &str = ".gz";
const TEMPORARY: &str = ".tmp";
/// Of the names.
const RESOLUTION: Duration = Duration::from_secs(1);

pub(super) async fn measure_logs(world: &World, logs: &[LogPlace]) -> Result<Facts, EffectError> {
    let mut by_root: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for log in logs {
        let path = PathBuf::from(&log.path);
        by_root.entry(world.paths.root_of(&path)).or_default().push(path);
    }
    let mut sizes = BTreeMap::new();
    for (root, paths) in by_root {
        let found = world.host.sizes_and_watch(&root, paths).await;
        sizes.extend(found.map_err(|error| failure::io("look at the logs below", &root, &error))?);
    }
    let of_log = |log: &LogPlace| Some((log.id.clone(), *sizes.get(Path::new(&log.path))?));
    Ok(Facts::LogSizes(logs.iter().filter_map(of_log).collect()))
}

pub(super) async fn rotate_log(world: &World, log: &LogPlace, max_files: u32) -> Result<Facts, EffectError> {
    let live = LiveLog::of(world, log)?;
    let rotated = live.put_aside(world).await?;
    if let Err(error) = world.runtime.reopen_container_log(log.id.as_str()).await {
        // The call may have succeeded all the same: then the file exists again and stays.
        if let Some(rotated) = rotated {
            match world.host.rename_beneath(&live.root, &live.dir.join(rotated), &live.name).await {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failure::io("rename back", &live.path(), &error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        return Err(failure::retry(&error));
    }
    // The live file is one of them.
    let keep = usize::try_from(max_files).unwrap_or(usize::MAX).saturating_sub(1);
    let rotated = live.rotated(world).await?;
    for name in &rotated[..rotated.len().saturating_sub(keep)] {
        live.remove(world, name).await?;
    }
    Ok(Facts::Nothing)
}

pub(super) async fn compress_logs(world: &World, log: &LogPlace) -> Result<Facts, EffectError> {
    let live = LiveLog::of(world, log)?;
    let all = live.siblings(world).await?;
    for name in all.iter().filter(|name| name.ends_with(TEMPORARY)) {
        live.remove(world, name).await?;
    }
    let rotated = live.rotated(world).await?;
    let older = rotated.len().saturating_sub(1);
    for name in rotated[..older].iter().filter(|name| !name.ends_with(COMPRESSED)) {
        if all.contains(&format!("{name}{COMPRESSED}")) {
            // It was compressed, and the agent died before it was removed.
            live.remove(world, name).await?;
            continue;
        }
        let path = live.dir.join(name);
        match world.host.compress_beneath(&live.root, &path).await {
            // A rotation has removed it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done.map_err(|error| failure::io("compress", &path, &error))?,
        }
    }
    Ok(Facts::Nothing)
}

/// The file that the runtime writes to.
struct LiveLog {
    root: PathBuf,
    dir: PathBuf,
    name: String,
}

impl LiveLog {
    fn of(world: &World, log: &LogPlace) -> Result<Self, EffectError> {
        let path = Path::new(&log.path);
        match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
            (Some(dir), Some(name)) => {
                Ok(LiveLog { root: world.paths.root_of(path), dir: dir.to_owned(), name: name.to_owned() })
            }
            _ => Err(failure::refused(format!("{:?} is not the path of a log", log.path))),
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// Returns its new name; `None` if it is missing.
    async fn put_aside(&self, world: &World) -> Result<Option<String>, EffectError> {
        let newest = self.rotated(world).await?.pop();
        let now = world.clock.now().wall.to_zoned(TimeZone::system()).datetime();
        let name = rotated_name(&self.name, newest.as_deref(), now);
        match world.host.rename_beneath(&self.root, &self.path(), &name).await {
            Ok(()) => Ok(Some(name)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failure::io("rename", &self.path(), &error)),
        }
    }

    /// The names of everything that rotations made of it, in order.
    async fn siblings(&self, world: &World) -> Result<Vec<String>, EffectError> {
        let entries = world.host.list_dir(&self.dir).await;
        let entries = entries.map_err(|error| failure::io("list directory", &self.dir, &error))?;
        let prefix = format!("{}.", self.name);
        Ok(entries.into_iter().map(|entry| entry.name).filter(|name| name.starts_with(&prefix)).collect())
    }

    /// The rotated files, the oldest first. A file and its compressed form are both there if the agent died between them.
    async fn rotated(&self, world: &World) -> Result<Vec<String>, EffectError> {
        let mut names = self.siblings(world).await?;
        names.retain(|name| !name.ends_with(TEMPORARY));
        names.sort();
        Ok(names)
    }

    async fn remove(&self, world: &World, name: &str) -> Result<(), EffectError> {
        let path = self.dir.join(name);
        let removed = world.host.remove_file_beneath(&self.root, &path).await;
        removed.map_err(|error| failure::io("remove", &path, &error))
    }
}

/// Sorted by name, a file comes after all that were rotated before it, whatever the wall clock did: the oldest are removed, and
/// the newest is not compressed.
fn rotated_name(live: &str, newest: Option<&str>, now: DateTime) -> String {
    const FORMAT: &str = "%Y%m%d-%H%M%S";
    let moment_of = |name: &str| {
        let moment = name.strip_prefix(live)?.strip_prefix('.')?;
        DateTime::strptime(FORMAT, moment.strip_suffix(COMPRESSED).unwrap_or(moment)).ok()
    };
    let next = newest.and_then(moment_of).and_then(|moment| moment.checked_add(RESOLUTION).ok());
    format!("{live}.{}", next.map_or(now, |next| next.max(now)).strftime(FORMAT))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rubelet_core::id::{ContainerId, PodRef};

    use super::*;
    use crate::world::testing::world_in;

    fn place(world: &World, pod: &str) -> LogPlace {
        let path = world.paths.pod_logs_dir.join(pod).join("main/0.log");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        LogPlace {
            pod: PodRef { uid: "u1".into(), namespace: "default".into(), name: pod.into() },
            container: "main".to_owned(),
            id: ContainerId::new(pod),
            path: path.to_str().unwrap().to_owned(),
        }
    }

    fn names(log: &LogPlace) -> Vec<String> {
        let entries = fs::read_dir(Path::new(&log.path).parent().unwrap()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn sizes_are_of_regular_files_and_missing_ones_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let [full, missing, link] = ["full", "missing", "link"].map(|name| place(&world, name));
        fs::write(&full.path, "12345").unwrap();
        std::os::unix::fs::symlink(&full.path, &link.path).unwrap();
        let sizes = measure_logs(&world, &[full, missing, link]).await.unwrap();
        let expected = [(ContainerId::new("full"), Some(5)), (ContainerId::new("missing"), None)];
        assert_eq!(sizes, Facts::LogSizes(expected.into()));
    }

    #[tokio::test]
    async fn rotated_files_but_the_newest_are_compressed() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let log = place(&world, "web");
        for rotated in ["", ".20260101-000001.gz", ".20260101-000002", ".20260101-000003", ".20260101-000004"] {
            fs::write(format!("{}{rotated}", log.path), "line\n").unwrap();
        }
        // Left behind by an agent that died.
        fs::write(format!("{}.20260101-000003.gz", log.path), "line\n").unwrap();
        fs::write(format!("{}.20260101-000002.tmp", log.path), "li").unwrap();
        compress_logs(&world, &log).await.unwrap();
        let suffixes = [".20260101-000001.gz", ".20260101-000002.gz", ".20260101-000003.gz", ".20260101-000004"];
        let expected: Vec<_> = std::iter::once("").chain(suffixes).map(|suffix| format!("0.log{suffix}")).collect();
        assert_eq!(names(&log), expected);
    }

    #[tokio::test]
    async fn log_is_renamed_back_if_the_runtime_does_not_open_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let world = world_in(dir.path());
        let log = place(&world, "web");
        fs::write(&log.path, "line\n").unwrap();
        rotate_log(&world, &log, 5).await.unwrap_err();
        assert_eq!(names(&log), ["0.log"]);
    }

    #[test]
    fn rotated_names_have_upstreams_form_and_always_grow() {
        let now = "2026-11-17T21:58:01.5".parse().unwrap();
        for (newest, expected) in [
            (None, "0.log.20261117-215801"),
            (Some("0.log.20261117-215800"), "0.log.20261117-215801"),
            (Some("0.log.20261117-215801"), "0.log.20261117-215802"),
            (Some("0.log.20261231-235959.gz"), "0.log.20270101-000000"),
            (Some("0.log.old"), "0.log.20261117-215801"),
        ] {
            assert_eq!(rotated_name("0.log", newest, now), expected, "{newest:?}");
        }
    }
}
