//! Static pods from a directory of manifests, or from a single file.
//!
//! Owns: noticing changes, and which pods each file defines. A kernel hint only triggers a read; a slow periodic read
//! finds what hints lost. An invalid file affects no other, and a file that was valid keeps its pods while it is unreadable
//! or half written. Only removing a file removes its pods. While there is an unreadable file
//! that this process has never read, the set is partial: a running pod may be defined by it, and is not an orphan.
//! Upstream: `config/file.go`, `config/file_linux.go`; there an invalid file loses its pod at the next read.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use rubelet_core::{
    event::{Event, Source},
    fnv::Fnv128,
    manifest::Origin,
};
use rubelet_host::{
    port::{DirEntry, FileKind, ReadError},
    watch::Hints,
};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{MAX_MANIFEST_BYTES, Reading, read_manifest, refuse, remark};
use crate::world::World;

/// Files are local; a slower read means a hung file system.
const READ_DEADLINE: Duration = Duration::from_secs(10);
/// The retry period for a directory that cannot be watched: it does not exist yet, or the watch limit is reached.
const UNWATCHED_PERIOD: Duration = Duration::from_secs(1);
/// A write counts as complete after this long without another change.
const QUIET: Duration = Duration::from_millis(5);
/// A directory that changes all the time is read after this long.
const MAX_SETTLE_ROUNDS: u32 = 10;
/// A file must stay invalid this long before it is reported: most invalid files are half written.
const BAD_FOR: Duration = Duration::from_millis(50);

/// Sends the complete set of pods on each change, and once at start. Ends when the receiver is gone.
pub async fn run(world: World, path: PathBuf, check_every: Duration, events: mpsc::Sender<Event>) {
    let mut manifests = Manifests { node_name: world.settings.node_name.clone(), files: BTreeMap::new() };
    let mut hints = None;
    let mut sent: Option<Event> = None;
    let mut unreadable: Option<String> = None;
    loop {
        // Watch first, then read: a change in between leaves a hint.
        if hints.is_none() {
            hints = watch(&world, &path).await;
        }
        match look(&world, &path).await {
            Ok(found) => {
                unreadable = None;
                for news in manifests.take(found) {
                    news.tell(&world);
                }
                let (source, pods) = (Source::File, manifests.pods());
                let event = if manifests.has_unread() {
                    Event::PartialConfig { source, pods }
                } else {
                    Event::Config { source, pods }
                };
                if sent.as_ref().is_none_or(|sent| !same(sent, &event)) {
                    sent = Some(event.clone());
                    if events.send(event).await.is_err() {
                        return;
                    }
                }
            }
            // Unreadable is not empty: every pod stays, and a source that was never read is not ready.
            Err(error) => {
                let problem = format!("cannot read manifests: {error}");
                if unreadable.as_ref() != Some(&problem) {
                    refuse(&world, &path.to_string_lossy(), &problem);
                    unreadable = Some(problem);
                }
            }
        }
        let wait = if manifests.has_doubtful() {
            BAD_FOR
        } else if hints.is_none() {
            check_every.min(UNWATCHED_PERIOD)
        } else {
            check_every
        };
        hints = next_hint(hints, wait).await;
    }
}

/// Waits for a hint or the next periodic read; returns the watch unless it ended.
async fn next_hint(hints: Option<Hints>, wait: Duration) -> Option<Hints> {
    let Some(mut hints) = hints else {
        sleep(wait).await;
        return None;
    };
    match timeout(wait, hints.recv()).await {
        Err(_elapsed) => return Some(hints),
        Ok(None) => {
            // The directory was removed. If it is recreated and removed repeatedly, this must not spin.
            sleep(QUIET).await;
            return None;
        }
        Ok(Some(())) => {}
    }
    for _ in 0..MAX_SETTLE_ROUNDS {
        match timeout(QUIET, hints.recv()).await {
            Err(_elapsed) => break,
            Ok(None) => return None,
            Ok(Some(())) => {}
        }
    }
    Some(hints)
}

async fn watch(world: &World, path: &Path) -> Option<Hints> {
    let dir = match timeout(READ_DEADLINE, world.host.file_kind(path)).await {
        Ok(Ok(Some(FileKind::Directory))) => path,
        // A single manifest is watched by its directory: editors replace files.
        _ => path.parent()?,
    };
    timeout(READ_DEADLINE, world.host.watch_dir(dir)).await.ok()?.ok()
}

/// The files present now.
type Found = Vec<(PathBuf, Content)>;

#[derive(Debug)]
enum Content {
    Text(Vec<u8>),
    /// It exists and is unreadable: perhaps temporarily.
    Unreadable(String),
    /// It exists, and is not a regular file.
    Unfit(String),
    /// A dangling link, which removes a linked manifest.
    Dangling,
}

async fn look(world: &World, path: &Path) -> io::Result<Found> {
    match timeout(READ_DEADLINE, world.host.file_kind(path)).await?? {
        // A missing directory is an empty set, so that a node without manifests becomes ready.
        None => Ok(Vec::new()),
        Some(FileKind::Directory) => look_into(world, path).await,
        Some(
            FileKind::File
            | FileKind::Symlink
            | FileKind::Fifo
            | FileKind::Socket
            | FileKind::CharDevice
            | FileKind::BlockDevice,
        ) => {
            let content = read(world, path).await;
            Ok(content.map(|content| (path.to_owned(), content)).into_iter().collect())
        }
    }
}

async fn look_into(world: &World, dir: &Path) -> io::Result<Found> {
    let mut found = Vec::new();
    for DirEntry { name, kind } in timeout(READ_DEADLINE, world.host.list_dir(dir)).await?? {
        if name.starts_with('.') {
            continue;
        }
        let path = dir.join(name);
        let content = match kind {
            FileKind::Directory => {
                Some(Content::Unfit("it is a directory; manifests are not looked for inside".to_owned()))
            }
            FileKind::Symlink => Some(read(world, &path).await.unwrap_or(Content::Dangling)),
            FileKind::File | FileKind::Fifo | FileKind::Socket | FileKind::CharDevice | FileKind::BlockDevice => {
                read(world, &path).await
            }
        };
        found.extend(content.map(|content| (path, content)));
    }
    Ok(found)
}

/// `None`: it does not exist.
async fn read(world: &World, path: &Path) -> Option<Content> {
    match timeout(READ_DEADLINE, world.host.read_file(path, MAX_MANIFEST_BYTES)).await {
        Ok(Ok(text)) => Some(Content::Text(text)),
        Ok(Err(ReadError::Io(error))) if error.kind() == io::ErrorKind::NotFound => None,
        Ok(Err(error @ ReadError::Io(_))) => Some(Content::Unreadable(error.to_string())),
        Ok(Err(error)) => Some(Content::Unfit(error.to_string())),
        Err(_elapsed) => Some(Content::Unreadable(format!("reading takes longer than {} s", READ_DEADLINE.as_secs()))),
    }
}

/// The known files and their pods.
#[derive(Debug)]
struct Manifests {
    node_name: String,
    files: BTreeMap<PathBuf, Known>,
}

#[derive(Debug)]
struct Known {
    /// The result of the last read, to detect changes.
    seen: Seen,
    /// Of the last valid content; `None` if it was never read by this process.
    pods: Option<Vec<Arc<Pod>>>,
    state: FileState,
}

/// Detects changes between two reads.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Text(Fnv128),
    Unreadable(String),
    Dangling,
}

impl Seen {
    fn of(content: &Content) -> Self {
        match content {
            Content::Text(text) => Seen::Text(Fnv128::of(text)),
            Content::Unreadable(problem) | Content::Unfit(problem) => Seen::Unreadable(problem.clone()),
            Content::Dangling => Seen::Dangling,
        }
    }
}

#[derive(Debug)]
enum FileState {
    Good,
    /// Invalid since the last read; it may still be being written.
    Doubtful(String),
    /// Invalid, and reported.
    Bad,
}

/// What to report about a file.
#[derive(Debug, PartialEq, Eq)]
enum News {
    Refused { path: PathBuf, problem: String },
    Remark { path: PathBuf, remark: String },
}

impl News {
    fn tell(&self, world: &World) {
        match self {
            News::Refused { path, problem } => refuse(world, &path.to_string_lossy(), problem),
            News::Remark { path, remark: text } => remark(world, &path.to_string_lossy(), text),
        }
    }
}

impl Manifests {
    /// Applies the result of a read.
    fn take(&mut self, found: Found) -> Vec<News> {
        let mut before = std::mem::take(&mut self.files);
        let mut news = Vec::new();
        for (path, content) in found {
            let known = match before.remove(&path) {
                Some(known) if known.seen == Seen::of(&content) => known.seen_again(&path, &mut news),
                known => {
                    let last_good = known.and_then(|known| known.pods);
                    self.read(&path, content, last_good, &mut news)
                }
            };
            self.files.insert(path, known);
        }
        news
    }

    fn read(&self, path: &Path, content: Content, last_good: Option<Vec<Arc<Pod>>>, news: &mut Vec<News>) -> Known {
        let seen = Seen::of(&content);
        let (problem, pods) = match content {
            Content::Text(text) => {
                let Reading { pods, remarks } = self.reading(path, &text);
                match pods {
                    Ok(pods) => {
                        news.extend(remarks.into_iter().map(|remark| News::Remark { path: path.to_owned(), remark }));
                        return Known { seen, pods: Some(pods), state: FileState::Good };
                    }
                    Err(problem) => (problem, Some(last_good.unwrap_or_default())),
                }
            }
            Content::Unreadable(problem) => (problem, last_good),
            Content::Unfit(problem) => (problem, Some(last_good.unwrap_or_default())),
            Content::Dangling => ("it is a link that leads nowhere".to_owned(), Some(Vec::new())),
        };
        Known { seen, pods, state: FileState::Doubtful(problem) }
    }

    fn reading(&self, path: &Path, text: &[u8]) -> Reading {
        read_manifest(text, &Origin::File(path.to_string_lossy().into_owned()), &self.node_name)
    }

    /// In file order: of two pods of one name the first file's wins, whenever they were written.
    fn pods(&self) -> Vec<Arc<Pod>> {
        self.files.values().flat_map(|known| &known.pods).flatten().cloned().collect()
    }

    /// Whether a file exists whose pods are unknown.
    fn has_unread(&self) -> bool {
        self.files.values().any(|known| known.pods.is_none())
    }

    fn has_doubtful(&self) -> bool {
        self.files.values().any(|known| matches!(known.state, FileState::Doubtful(_)))
    }
}

impl Known {
    fn seen_again(mut self, path: &Path, news: &mut Vec<News>) -> Known {
        if let FileState::Doubtful(problem) = self.state {
            let kept = if self.pods.as_ref().is_none_or(Vec::is_empty) {
                ""
            } else {
                "; the pod keeps running as it was last good"
            };
            news.push(News::Refused { path: path.to_owned(), problem: format!("{problem}{kept}") });
            self.state = FileState::Bad;
        }
        self
    }
}

/// Unchanged files keep their pods, so comparing pointers is enough.
fn same(a: &Event, b: &Event) -> bool {
    match (a, b) {
        (Event::Config { pods: a, .. }, Event::Config { pods: b, .. })
        | (Event::PartialConfig { pods: a, .. }, Event::PartialConfig { pods: b, .. }) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
