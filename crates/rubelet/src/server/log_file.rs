//! Reads a container's log, once or following it.
//!
//! Owns: decoding CRI log files to the container's output: the last lines, lines since a time,
//! following across rotation. If the live file has too few lines, rotated files are read as well. Never: follows a
//! link below the log directory, reads anything but a regular file, blocks a thread for a slow reader.
//! Upstream: `cri-client/pkg/logs`.

use std::{
    collections::BTreeSet,
    fmt,
    fs::File,
    future::Future,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    pin::Pin,
    time::Duration,
};

use axum::body::Bytes;
use futures_util::{Stream, stream};
use jiff::Timestamp;
use rubelet_core::container::logs::container_log;
use rubelet_host::{
    fs,
    port::ReadError,
    threads::for_caller,
    watch::{Hints, Watches},
};

mod choice;
mod lines;
mod rotated;

pub(crate) use choice::{LogRun, choose_attempt};
pub(crate) use lines::{Filter, Lines, Streams, Timestamps};
use rotated::RotatedLogs;

/// Bytes read at a time, and approximate bytes returned at a time.
const BLOCK_BYTES: usize = 64 * 1024;
/// The poll period that finds changes without a hint.
const AUDIT: Duration = Duration::from_secs(5);
/// The poll period when the inotify limit is reached, as upstream's.
const LOOK: Duration = Duration::from_secs(1);
/// The last output may not be written yet when the container is reported stopped.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// How long the runtime may write to a log after it began the next one.
const LATE_WRITES: Duration = Duration::from_millis(500);

/// Completes when the container has stopped.
pub(crate) type Stopped = Pin<Box<dyn Future<Output = ()> + Send>>;

/// When following ends, and its source of hints.
pub(crate) struct Follow {
    pub stopped: Stopped,
    pub watches: Watches,
}

impl fmt::Debug for Follow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follow").finish_non_exhaustive()
    }
}

pub(crate) struct LogRequest {
    /// `podLogsDir`. Links below it are not followed.
    pub logs_dir: PathBuf,
    /// `<namespace>_<name>_<uid>`
    pub pod_dir_name: String,
    pub container: String,
    /// Which run of the container; see `choose_attempt`.
    pub attempt: u32,
    /// Only this many lines from the end.
    pub tail: Option<u64>,
    /// Only lines written at this time or later.
    pub since: Option<Timestamp>,
    /// At most this many bytes in total.
    pub limit_bytes: Option<u64>,
    pub timestamps: Timestamps,
    pub streams: Streams,
    /// Follow the log until the container has stopped.
    pub follow: Option<Follow>,
}

impl fmt::Debug for LogRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogRequest").field("file", &self.file()).field("tail", &self.tail).finish_non_exhaustive()
    }
}

impl LogRequest {
    /// Below `logs_dir`.
    fn file(&self) -> PathBuf {
        Path::new(&self.pod_dir_name).join(container_log(&self.container, self.attempt))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("read log {}", path.display())]
pub(crate) struct LogError {
    path: PathBuf,
    #[source]
    source: ReadError,
}

/// Opens the log and streams it. The stream reads only when polled, so a slow reader costs nothing.
pub(crate) async fn read(
    request: LogRequest,
) -> Result<impl Stream<Item = io::Result<Bytes>> + Send + 'static, LogError> {
    let path = request.logs_dir.join(request.file());
    let reader = open(request).await.map_err(|source| LogError { path, source })?;
    Ok(stream::try_unfold(reader, LogReader::next))
}

async fn open(request: LogRequest) -> Result<LogReader, ReadError> {
    let place = Place { logs_dir: request.logs_dir.clone(), file: request.file() };
    // Watched before it is read, so that no write in between is missed.
    let following = match request.follow {
        None => None,
        Some(Follow { stopped, watches }) => {
            let dir = place.logs_dir.join(place.file.parent().expect("it was joined from three parts"));
            Some(Following { stopped, hints: watches.watch_dir(&dir).await.ok(), phase: Phase::Running })
        }
    };
    let filter = Filter { since: request.since, timestamps: request.timestamps, streams: request.streams };
    let (tail, to_its_end) = (request.tail, following.is_none());
    let source = for_caller(move || {
        let mut file = place.open()?;
        let Tail { start, missing } = tail.map_or(Ok(Tail::WHOLE), |lines| start_of_tail(&mut file, lines))?;
        let rotated = match missing {
            None => RotatedLogs::all(&place, &file, filter.since)?,
            Some(0) => RotatedLogs::default(),
            Some(lines) => RotatedLogs::tail(&place, &file, lines)?,
        };
        let earlier = if to_its_end { BTreeSet::new() } else { RotatedLogs::earlier_than(&place, &file)? };
        let end = file.metadata()?.len();
        file.seek(SeekFrom::Start(start))?;
        // Without following, the log ends where it ended when it was opened, however fast it grows.
        let left = if to_its_end { end.saturating_sub(start) } else { u64::MAX };
        Ok::<_, ReadError>(Source { place, rotated, earlier, is_settled: false, file, left, lines: Lines::new(filter) })
    })
    .await?;
    Ok(LogReader { source, following, allowed: request.limit_bytes.unwrap_or(u64::MAX) })
}

struct LogReader {
    source: Source,
    /// The remaining byte limit.
    allowed: u64,
    following: Option<Following>,
}

struct Following {
    stopped: Stopped,
    /// The log may have changed.
    hints: Option<Hints>,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// The container stopped; one more read, then the end.
    Stopped,
    Over,
}

impl LogReader {
    async fn next(mut self) -> io::Result<Option<(Bytes, LogReader)>> {
        loop {
            let mut source = self.source;
            let (result, returned) = for_caller(move || Ok::<_, io::Error>((source.read_block(), source))).await?;
            self.source = returned;
            let block = result?;
            if self.allowed == 0 {
                return Ok(None);
            }
            if !block.text.is_empty() {
                return Ok(Some(self.hand_out(block.text)));
            }
            match block.reached {
                Reached::More => continue,
                Reached::Rotated => {
                    tokio::time::sleep(LATE_WRITES).await;
                    self.source.is_settled = true;
                    continue;
                }
                Reached::End => {}
            }
            match &mut self.following {
                Some(following) if following.phase != Phase::Over => following.wait().await,
                Some(_) | None => {
                    let rest = self.source.lines.take_rest();
                    return Ok((!rest.is_empty()).then(|| self.hand_out(rest)));
                }
            }
        }
    }

    fn hand_out(mut self, mut text: Vec<u8>) -> (Bytes, LogReader) {
        text.truncate(usize::try_from(self.allowed).unwrap_or(usize::MAX));
        self.allowed -= text.len() as u64;
        (text.into(), self)
    }
}

impl Following {
    /// Waits until there may be more to read. Cancel safe: a hint not taken stays in its channel.
    async fn wait(&mut self) {
        if self.phase == Phase::Stopped {
            self.phase = Phase::Over;
            return;
        }
        let mut has_stopped = false;
        let audit = if self.hints.is_some() { AUDIT } else { LOOK };
        let hint = async {
            match &mut self.hints {
                Some(hints) => hints.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // All arms only wait, so the losers can be awaited again.
            hint = hint => has_stopped = hint.is_none(),
            () = &mut self.stopped => {
                tokio::time::sleep(LAST_WORDS).await;
                has_stopped = true;
            }
            () = tokio::time::sleep(audit) => {}
        }
        if has_stopped {
            self.phase = Phase::Stopped;
        }
    }
}

struct Place {
    logs_dir: PathBuf,
    file: PathBuf,
}

impl Place {
    fn open(&self) -> Result<File, ReadError> {
        fs::open_beneath(&self.logs_dir, &self.file)
    }
}

/// The blocking side: a file, and bytes read but not yet returned.
struct Source {
    place: Place,
    /// Read before the file.
    rotated: RotatedLogs,
    /// Of a log that is followed: the files rotated before this one.
    earlier: BTreeSet<String>,
    /// The file was at its end for as long as late writes may take.
    is_settled: bool,
    file: File,
    left: u64,
    lines: Lines,
}

struct Block {
    text: Vec<u8>,
    reached: Reached,
}

#[derive(PartialEq, Eq)]
enum Reached {
    /// There may be more data now.
    More,
    /// The end of a file that was just rotated: the runtime may not have written its last lines.
    Rotated,
    End,
}

impl Source {
    fn read_block(&mut self) -> io::Result<Block> {
        let mut buffer = vec![0; BLOCK_BYTES];
        match self.rotated.read(&self.place, &mut buffer) {
            rotated::Read::Block { bytes, start } => {
                return Ok(Block { text: self.lines.take(&buffer[start..bytes]), reached: Reached::More });
            }
            rotated::Read::End => return Ok(Block { text: self.lines.take_rest(), reached: Reached::More }),
            rotated::Read::Nothing => {}
        }
        let wanted = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read(&mut buffer[..wanted])?;
        self.left -= read as u64;
        if read > 0 {
            self.is_settled = false;
            return Ok(Block { text: self.lines.take(&buffer[..read]), reached: Reached::More });
        }
        match if self.left > 0 { self.move_on()? } else { Move::Nowhere } {
            Move::Nowhere => Ok(Block { text: Vec::new(), reached: Reached::End }),
            Move::Further => Ok(Block { text: Vec::new(), reached: Reached::More }),
            Move::Later => Ok(Block { text: Vec::new(), reached: Reached::Rotated }),
            Move::NewFile => Ok(Block { text: self.lines.take_rest(), reached: Reached::More }),
        }
    }

    /// At the end of the file: if it was rotated or truncated, reading continues at the start of the new one.
    fn move_on(&mut self) -> io::Result<Move> {
        let current = match self.place.open() {
            Ok(file) => file,
            // Between the rename of the old file and the creation of the new one, or after the pod was removed.
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(Move::Nowhere),
            Err(ReadError::Io(error)) => return Err(error),
            Err(error) => return Err(io::Error::other(error)),
        };
        let new = current.metadata()?;
        let old = self.file.metadata()?;
        let position = self.file.stream_position()?;
        if (old.dev(), old.ino()) == (new.dev(), new.ino()) {
            if new.len() >= position {
                return Ok(Move::Nowhere);
            }
        } else if old.len() > position {
            // Written after our last read and before the rotation.
            return Ok(Move::Further);
        } else {
            return self.leave_rotated(current, new.len() == 0);
        }
        self.file = current;
        Ok(Move::NewFile)
    }

    /// The file was rotated: what follows is the next rotated one, or the live one. containerd writes the last lines of a log
    /// after the first ones of the next.
    fn leave_rotated(&mut self, live: File, is_live_empty: bool) -> io::Result<Move> {
        let between = RotatedLogs::between(&self.place, &self.earlier, &self.file, &live).map_err(io::Error::other)?;
        if between.is_empty() && is_live_empty {
            // The runtime creates the new file before it switches to it: while the new one is empty, the old one may grow.
            return Ok(Move::Nowhere);
        }
        if between.is_empty() && !self.is_settled {
            return Ok(Move::Later);
        }
        self.rotated = between;
        // The newest of them may be just as new.
        self.file = self.rotated.take_newest(&self.place).unwrap_or(live);
        self.earlier = RotatedLogs::earlier_than(&self.place, &self.file).map_err(io::Error::other)?;
        self.is_settled = false;
        Ok(Move::NewFile)
    }
}

enum Move {
    Nowhere,
    /// There is more in the same file.
    Further,
    /// Its last lines may be missing yet.
    Later,
    NewFile,
}

/// The last lines of a file.
struct Tail {
    start: u64,
    /// How many lines are missing; `None` if there is no line limit.
    missing: Option<u64>,
}

impl Tail {
    const WHOLE: Tail = Tail { start: 0, missing: None };
}

/// Where the last `lines` lines begin. An incomplete last line does not count.
fn start_of_tail(file: &mut File, lines: u64) -> io::Result<Tail> {
    let mut seen = 0;
    let mut right = file.seek(SeekFrom::End(0))?;
    let mut buffer = vec![0; BLOCK_BYTES];
    while right > 0 {
        let left = right.saturating_sub(BLOCK_BYTES as u64);
        let block = &mut buffer[..usize::try_from(right - left).expect("at most a block")];
        file.seek(SeekFrom::Start(left))?;
        file.read_exact(block)?;
        for (offset, _) in block.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            if seen == lines {
                return Ok(Tail { start: left + offset as u64 + 1, missing: Some(0) });
            }
            seen += 1;
        }
        right = left;
    }
    Ok(Tail { start: 0, missing: Some(lines - seen) })
}

#[cfg(test)]
mod tests {
    use std::{fs as std_fs, future::pending, io::Write, net::SocketAddr, os::unix::fs::symlink, sync::Arc};

    use axum::{Router, body::Body, routing::get};
    use futures_util::{StreamExt, future::join_all};
    use rubelet_host::{lanes::Lanes, watch::Interest};
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
        sync::oneshot,
        time::timeout,
    };
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::server::{
        connections::{self, Limits},
        tests::alone::{descriptors, is_alone, many, settle},
    };

    /// A pod's log directory with one container.
    struct LogFixture {
        dir: tempfile::TempDir,
        watches: Watches,
    }

    impl LogFixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            std_fs::create_dir_all(dir.path().join("ns_pod_uid/app")).unwrap();
            LogFixture { dir, watches: Watches::new(Interest::Writes, Lanes::own_files()) }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join("ns_pod_uid/app").join(name)
        }

        fn append(&self, name: &str, texts: &[&str]) {
            let mut file = File::options().create(true).append(true).open(self.path(name)).unwrap();
            for text in texts {
                file.write_all(format!("2026-11-15T10:00:00.000000000Z stdout F {text}\n").as_bytes()).unwrap();
            }
        }

        fn request(&self) -> LogRequest {
            LogRequest {
                logs_dir: self.dir.path().to_owned(),
                pod_dir_name: "ns_pod_uid".to_owned(),
                container: "app".to_owned(),
                attempt: 0,
                tail: None,
                since: None,
                limit_bytes: None,
                timestamps: Timestamps::Hidden,
                streams: Streams::All,
                follow: None,
            }
        }

        fn follow(&self, stopped: Stopped) -> Follow {
            Follow { stopped, watches: self.watches.clone() }
        }

        async fn text(&self, request: LogRequest) -> String {
            let chunks: Vec<_> = read(request).await.unwrap().map(Result::unwrap).collect().await;
            String::from_utf8(chunks.concat()).unwrap()
        }
    }

    /// A followed log, and its output.
    struct Follower {
        stream: Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>,
        stop: Option<oneshot::Sender<()>>,
        seen: String,
    }

    impl Follower {
        async fn new(fixture: &LogFixture, tail: Option<u64>) -> Self {
            let (stop, stopped) = oneshot::channel();
            let follow: Stopped = Box::pin(async { drop(stopped.await) });
            let stream =
                read(LogRequest { follow: Some(fixture.follow(follow)), tail, ..fixture.request() }).await.unwrap();
            Follower { stream: Box::pin(stream), stop: Some(stop), seen: String::new() }
        }

        async fn until(&mut self, text: &str) {
            while !self.seen.contains(text) {
                // Shorter than the poll period, so that the hint is tested.
                let chunk = tokio::time::timeout(Duration::from_secs(3), self.stream.next()).await;
                let chunk = chunk.unwrap_or_else(|_| panic!("{text:?} does not come after {:?}", self.seen));
                self.seen += std::str::from_utf8(&chunk.unwrap().unwrap()).unwrap();
            }
        }

        async fn seen_to_the_end(mut self) -> String {
            self.stop.take().unwrap().send(()).unwrap();
            let rest = async {
                while let Some(chunk) = self.stream.next().await {
                    self.seen += std::str::from_utf8(&chunk.unwrap()).unwrap();
                }
            };
            tokio::time::timeout(Duration::from_secs(3), rest).await.expect("the end after the container stopped");
            self.seen
        }
    }

    #[tokio::test]
    async fn a_log_is_read_whole_or_from_its_tail() {
        let fixture = LogFixture::new();
        fixture.append("0.log", &["one", "two", "three"]);
        let tails = [(None, "one two three"), (Some(0), ""), (Some(1), "three"), (Some(3), "one two three")];
        for (tail, expected) in tails.into_iter().chain([(Some(u64::MAX), "one two three")]) {
            let text = fixture.text(LogRequest { tail, ..fixture.request() }).await;
            assert_eq!(text.split_whitespace().collect::<Vec<_>>().join(" "), expected, "{tail:?}");
        }
    }

    #[tokio::test]
    async fn the_tail_of_a_log_of_many_blocks_is_exact() {
        let fixture = LogFixture::new();
        let lines: Vec<String> = (0..5000).map(|number| format!("{number} {}", "x".repeat(number % 300))).collect();
        fixture.append("0.log", &lines.iter().map(String::as_str).collect::<Vec<_>>());
        for tail in [1, 999, 4321, 5000, 6000] {
            let text = fixture.text(LogRequest { tail: Some(tail as u64), ..fixture.request() }).await;
            let expected = &lines[lines.len().saturating_sub(tail)..];
            assert!(text.lines().eq(expected), "tail {tail}");
        }
    }

    #[tokio::test]
    async fn a_log_that_grows_faster_than_it_is_read_has_an_end() {
        let fixture = LogFixture::new();
        fixture.append("0.log", &["x".repeat(1000).as_str(); 200]);
        let mut stream = Box::pin(read(fixture.request()).await.unwrap());
        let mut bytes = 0;
        while let Some(chunk) = stream.next().await {
            bytes += chunk.unwrap().len();
            fixture.append("0.log", &["y".repeat(1000).as_str(); 200]);
            assert!(bytes <= 200 * 1001, "read beyond the end it had");
        }
        assert_eq!(bytes, 200 * 1001);
    }

    #[tokio::test]
    async fn follow_shows_lines_once_across_rotations_until_container_ends() {
        let fixture = LogFixture::new();
        fixture.append("0.log", &["old", "first"]);
        let mut follower = Follower::new(&fixture, Some(1)).await;
        follower.until("first").await;
        for round in 0..3 {
            fixture.append("0.log", &[&format!("before-{round}")]);
            std_fs::rename(fixture.path("0.log"), fixture.path(&format!("0.log.{round}"))).unwrap();
            // The runtime still has the renamed file open when the new one appears.
            File::create(fixture.path("0.log")).unwrap();
            fixture.append(&format!("0.log.{round}"), &[&format!("late-{round}")]);
            follower.until(&format!("late-{round}")).await;
            fixture.append("0.log", &[&format!("after-{round}")]);
            follower.until(&format!("after-{round}")).await;
        }
        fixture.append("0.log", &["last"]);
        let seen = follower.seen_to_the_end().await;
        let expected = "first before-0 late-0 after-0 before-1 late-1 after-1 before-2 late-2 after-2 last";
        assert_eq!(seen.split_whitespace().collect::<Vec<_>>().join(" "), expected);
    }

    #[tokio::test]
    async fn slow_follower_reads_every_file_rotated_meanwhile() {
        let fixture = LogFixture::new();
        let rotated = |number: u32| format!("0.log.20261115-10000{number}");
        fixture.append(&rotated(0), &["earlier"]);
        fixture.append("0.log", &["first"]);
        let mut follower = Follower::new(&fixture, Some(1)).await;
        follower.until("first").await;
        for number in 1..=4 {
            std_fs::rename(fixture.path("0.log"), fixture.path(&rotated(number))).unwrap();
            fixture.append("0.log", &[&format!("after-{number}")]);
        }
        // The runtime writes the last line of a log after the first of the next.
        fixture.append(&rotated(4), &["late-3"]);
        // The one it reads and the next are compressed.
        for number in 1..=2 {
            rubelet_host::fs::compress_beneath(fixture.dir.path(), &fixture.path(&rotated(number)), &|| Ok(()))
                .unwrap();
        }
        follower.until("after-4").await;
        let seen = follower.seen_to_the_end().await;
        assert_eq!(
            seen.split_whitespace().collect::<Vec<_>>(),
            ["first", "after-1", "after-2", "after-3", "late-3", "after-4"]
        );
    }

    #[tokio::test]
    async fn slow_follower_goes_on_although_the_live_log_is_empty() {
        let fixture = LogFixture::new();
        fixture.append("0.log", &["first"]);
        let mut follower = Follower::new(&fixture, None).await;
        follower.until("first").await;
        for number in 1..=3 {
            std_fs::rename(fixture.path("0.log"), fixture.path(&format!("0.log.20261115-10000{number}"))).unwrap();
            File::create(fixture.path("0.log")).unwrap();
            if number < 3 {
                fixture.append("0.log", &[&format!("after-{number}")]);
            }
        }
        // The runtime has not switched to the empty one.
        fixture.append("0.log.20261115-100003", &["late"]);
        follower.until("late").await;
        fixture.append("0.log", &["after-3"]);
        follower.until("after-3").await;
        let seen = follower.seen_to_the_end().await;
        assert_eq!(seen.split_whitespace().collect::<Vec<_>>(), ["first", "after-1", "after-2", "late", "after-3"]);
    }

    #[tokio::test]
    async fn follow_survives_truncation_and_waits_for_whole_lines() {
        let fixture = LogFixture::new();
        fixture.append("0.log", &["a long first line"]);
        let mut follower = Follower::new(&fixture, None).await;
        follower.until("a long first line\n").await;
        File::options().write(true).open(fixture.path("0.log")).unwrap().set_len(0).unwrap();
        let mut file = File::options().append(true).open(fixture.path("0.log")).unwrap();
        file.write_all(b"2026-11-15T10:00:00Z stdout F ha").unwrap();
        tokio::time::timeout(Duration::from_millis(200), follower.until("ha"))
            .await
            .expect_err("half a line was shown");
        file.write_all(b"lf\n").unwrap();
        follower.until("half\n").await;
        assert_eq!(follower.seen_to_the_end().await, "a long first line\nhalf\n");
    }

    #[tokio::test]
    async fn only_a_regular_file_below_the_log_directory_is_read() {
        let fixture = LogFixture::new();
        std_fs::write(fixture.dir.path().join("secret"), "secret").unwrap();
        symlink("../../secret", fixture.path("0.log")).unwrap();
        let hostile =
            [("ns_pod_uid", "app", 0), ("ns_pod_uid", "../..", 0), ("..", "etc", 0), ("ns_pod_uid", "none", 0)];
        for (pod_dir_name, container, attempt) in hostile {
            let (pod_dir_name, container) = (pod_dir_name.to_owned(), container.to_owned());
            let request = LogRequest { pod_dir_name, container: container.clone(), attempt, ..fixture.request() };
            let error = read(request).await.err().expect("nothing can be read there");
            let is_missing = matches!(&error.source, ReadError::Io(error) if error.kind() == io::ErrorKind::NotFound);
            assert_eq!(is_missing, container == "none", "{error:?}");
        }
    }

    #[tokio::test]
    async fn followers_beyond_inotify_limit_still_see_new_lines() {
        let fixture = LogFixture::new();
        fixture.append("0.log", &["first"]);
        let mut followers = Vec::new();
        for _ in 0..200 {
            followers.push(Follower::new(&fixture, None).await);
        }
        let seen = join_all(followers.iter_mut().map(|follower| follower.until("second")));
        let written = async {
            // By now all of them have read the first line and wait.
            tokio::time::sleep(Duration::from_millis(500)).await;
            fixture.append("0.log", &["second"]);
        };
        tokio::join!(seen, written);
    }

    #[tokio::test]
    async fn abandoned_followers_leave_no_descriptor_watch_or_task() {
        if !is_alone(module_path!(), "abandoned_followers_leave_no_descriptor_watch_or_task") {
            return;
        }
        let fixture = LogFixture::new();
        fixture.append("0.log", &["first"]);
        let log = Arc::new(fixture);
        let followed = log.clone();
        let router = Router::new().route(
            "/",
            get(move || {
                let request = LogRequest { follow: Some(followed.follow(Box::pin(pending()))), ..followed.request() };
                async move { Body::from_stream(read(request).await.unwrap()) }
            }),
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let stopped = stop.clone();
        let served =
            tokio::spawn(async move { connections::serve(&listener, router, Limits::OPEN_PORT, &stopped).await });
        drop(follow(address).await);
        settle(1).await;
        let before = descriptors();
        for round in 0..many() / 100 {
            let mut followers = Vec::new();
            for _ in 0..100 {
                followers.push(follow(address).await);
            }
            log.append("0.log", &[&format!("round {round}")]);
            drop(followers);
            settle(1).await;
            assert!(descriptors() <= before, "{} descriptors instead of {before}", descriptors());
            File::options().write(true).open(log.path("0.log")).unwrap().set_len(0).unwrap();
            log.append("0.log", &["first"]);
        }
        stop.cancel();
        served.await.unwrap();
    }

    /// A client that received the first line.
    async fn follow(address: SocketAddr) -> TcpStream {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nHost: n\r\n\r\n").await.unwrap();
        let (mut seen, mut buffer) = (Vec::new(), [0; 1024]);
        while !String::from_utf8_lossy(&seen).contains("first") {
            let read = timeout(Duration::from_secs(10), client.read(&mut buffer)).await.unwrap().unwrap();
            assert!(read > 0, "no line");
            seen.extend_from_slice(&buffer[..read]);
        }
        client
    }
}
