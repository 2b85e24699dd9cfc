//! Static pods from a directory of manifests, or from a single file.
//!
//! Owns: noticing changes, and which pods each file stands for. A hint from the kernel only causes a look; a slow look
//! finds what hints lost. One bad file affects no other, and a file that was good keeps its pods while it is unreadable
//! or half written: nobody's pod dies of an editor. Only a file that is gone takes its pods along. While a file cannot be read
//! that this process has not read before, the set is partial: what runs may be its pod, and is no orphan.
//! Upstream: `config/file.go`, `config/file_linux.go`; there a file gone bad loses its pod at the next look.

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

/// Files are local; one that takes longer lies on something that hangs.
const READ_DEADLINE: Duration = Duration::from_secs(10);
/// How often to look for a directory that cannot be watched: it does not exist yet, or the node is out of watches.
const UNWATCHED_PERIOD: Duration = Duration::from_secs(1);
/// A writer is taken to be done when nothing happened for this long.
const QUIET: Duration = Duration::from_millis(5);
/// But a directory in which something happens all the time is looked at nevertheless.
const MAX_SETTLE_ROUNDS: u32 = 10;
/// A file must stay bad this long before people are told: most bad files are half-written ones.
const BAD_FOR: Duration = Duration::from_millis(50);

/// Sends the whole set of pods whenever it changed, and once at the start. Ends when nobody listens any more.
pub async fn run(world: World, path: PathBuf, check_every: Duration, events: mpsc::Sender<Event>) {
    let mut manifests = Manifests { node_name: world.settings.node_name.clone(), files: BTreeMap::new() };
    let mut hints = None;
    let mut sent: Option<Event> = None;
    let mut unreadable: Option<String> = None;
    loop {
        // Watch first, then look: what changes in between leaves a hint.
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
            // Unreadable is not empty: every pod stays, and a source that never was read is not ready.
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

/// Waits for a hint or until it is time to look anyway; gives the watch back unless it ended.
async fn next_hint(hints: Option<Hints>, wait: Duration) -> Option<Hints> {
    let Some(mut hints) = hints else {
        sleep(wait).await;
        return None;
    };
    match timeout(wait, hints.recv()).await {
        Err(_elapsed) => return Some(hints),
        Ok(None) => {
            // The directory went away. Were it back at once and gone again, this must not spin.
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

/// What lies there now.
type Found = Vec<(PathBuf, Content)>;

#[derive(Debug)]
enum Content {
    Text(Vec<u8>),
    /// It is there, but why not readable: perhaps it will be again.
    Unreadable(String),
    /// It is there, and nothing that a pod could be read from.
    Unfit(String),
    /// A link to nothing, which is how a linked manifest is taken away.
    Dangling,
}

async fn look(world: &World, path: &Path) -> io::Result<Found> {
    match timeout(READ_DEADLINE, world.host.file_kind(path)).await?? {
        // Nothing there is an empty set, so that a node without manifests gets going.
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

/// `None`: there is nothing (any more).
async fn read(world: &World, path: &Path) -> Option<Content> {
    match timeout(READ_DEADLINE, world.host.read_file(path, MAX_MANIFEST_BYTES)).await {
        Ok(Ok(text)) => Some(Content::Text(text)),
        Ok(Err(ReadError::Io(error))) if error.kind() == io::ErrorKind::NotFound => None,
        Ok(Err(error @ ReadError::Io(_))) => Some(Content::Unreadable(error.to_string())),
        Ok(Err(error)) => Some(Content::Unfit(error.to_string())),
        Err(_elapsed) => Some(Content::Unreadable(format!("reading takes longer than {} s", READ_DEADLINE.as_secs()))),
    }
}

/// The files known and what they stand for.
#[derive(Debug)]
struct Manifests {
    node_name: String,
    files: BTreeMap<PathBuf, Known>,
}

#[derive(Debug)]
struct Known {
    /// What the last look found, to tell whether there is anything to do.
    seen: Seen,
    /// Of the last good content; `None` when it could not be read since this process started.
    pods: Option<Vec<Arc<Pod>>>,
    state: FileState,
}

/// What two looks are compared by.
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
    /// Bad since the last look; perhaps somebody is still writing.
    Doubtful(String),
    /// Bad, and people were told.
    Bad,
}

/// What people should hear about a file.
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
    /// Takes over what a look found.
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

    /// In the files' order: of two pods of one name the first file's wins, whenever they were written.
    fn pods(&self) -> Vec<Arc<Pod>> {
        self.files.values().flat_map(|known| &known.pods).flatten().cloned().collect()
    }

    /// A file is there of which nobody knows what it stands for.
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

/// Unchanged files keep their pods, so it is enough to compare what is pointed to.
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
