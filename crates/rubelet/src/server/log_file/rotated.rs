//! Rotated log files: `0.log.20261115-100000`, later `0.log.20261115-100000.gz`.
//!
//! Owns: finding them and reading the requested part, compressed or not. Never: follows a link, reads a file that is
//! still being compressed, buffers more than a block.
//! Upstream: `container_log_manager.go` creates them; its `kubectl logs` does not read them.

use std::{
    collections::{BTreeSet, VecDeque},
    fs::File,
    io::{self, Read as _},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    time::SystemTime,
};

use flate2::read::MultiGzDecoder;
use jiff::Timestamp;
use rubelet_host::{fs, port::ReadError};

use super::{BLOCK_BYTES, Place};

/// `containerLogMaxFiles` is 5 by default; more than this many are not read.
const MAX_FILES: usize = 100;
const PACKED: &str = ".gz";
const HEAD_BYTES: u64 = 128;

/// The rotated files that are still to be read, the oldest first.
#[derive(Default)]
pub(super) struct RotatedLogs {
    files: VecDeque<PathBuf>,
    /// Lines of the first file to skip.
    skip: u64,
    open: Option<Box<dyn io::Read + Send>>,
}

impl RotatedLogs {
    /// All files that may hold lines since then.
    pub(super) fn all(place: &Place, live: &File, since: Option<Timestamp>) -> Result<RotatedLogs, ReadError> {
        let live = live.metadata()?;
        let mut files = VecDeque::new();
        for name in names(place)? {
            let file = place.file.with_file_name(name);
            let Ok(opened) = fs::open_beneath(&place.logs_dir, &file) else { continue };
            let found = opened.metadata()?;
            // Rotated after it was opened: it is read as the live one.
            let is_live = (found.dev(), found.ino()) == (live.dev(), live.ino());
            let since = since.map(SystemTime::from);
            let is_old = since.is_some_and(|since| found.modified().is_ok_and(|written| written < since));
            if !is_live && !is_old {
                files.push_back(file);
            }
        }
        Ok(RotatedLogs { files, ..RotatedLogs::default() })
    }

    /// Only this many lines of their end.
    pub(super) fn tail(place: &Place, live: &File, mut lines: u64) -> Result<RotatedLogs, ReadError> {
        let mut all = RotatedLogs::all(place, live, None)?;
        let mut rotated = RotatedLogs::default();
        while lines > 0
            && let Some(file) = all.files.pop_back()
        {
            let held = count_lines(place, &file);
            rotated.skip = held.saturating_sub(lines);
            lines = lines.saturating_sub(held);
            rotated.files.push_front(file);
        }
        Ok(rotated)
    }

    /// The files that were rotated before this one was the live one, without their suffixes.
    pub(super) fn earlier_than(place: &Place, live: &File) -> Result<BTreeSet<String>, ReadError> {
        let head = head_of_file(live)?;
        let is_other = |name: &String| head.is_empty() || head_of(place, name) != head;
        Ok(names(place)?.into_iter().filter(is_other).map(|name| stem(&name).to_owned()).collect())
    }

    /// The files that were rotated after `old`, which was read to its end, and before `new`: a reader that was slow has not
    /// seen them. `earlier` are those before `old`.
    pub(super) fn between(
        place: &Place,
        earlier: &BTreeSet<String>,
        old: &File,
        new: &File,
    ) -> Result<RotatedLogs, ReadError> {
        let (old, new) = (head_of_file(old)?, head_of_file(new)?);
        let mut files: VecDeque<_> = names(place)?.into_iter().filter(|name| !earlier.contains(stem(name))).collect();
        let heads: Vec<_> = files.iter().map(|name| head_of(place, name)).collect();
        if let Some(rotated_again) = heads.iter().position(|head| !new.is_empty() && *head == new) {
            files.truncate(rotated_again);
        }
        // It may have been removed by now.
        let read = heads.iter().take(files.len()).position(|head| *head == old).map_or(0, |position| position + 1);
        files.drain(..read);
        let files = files.into_iter().map(|name| place.file.with_file_name(name)).collect();
        Ok(RotatedLogs { files, ..RotatedLogs::default() })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Opens the newest file instead of reading it here, if it is not compressed: it may still grow.
    pub(super) fn take_newest(&mut self, place: &Place) -> Option<File> {
        let newest = self.files.back()?;
        let opened = fs::open_beneath(&place.logs_dir, newest).ok().filter(|_| !is_packed(newest))?;
        self.files.pop_back();
        Some(opened)
    }

    /// Reads the next block into the buffer.
    pub(super) fn read(&mut self, place: &Place, buffer: &mut [u8]) -> Read {
        let Some(file) = self.files.front() else { return Read::Nothing };
        // Rotation may have removed it meanwhile.
        let reader = self.open.get_or_insert_with(|| open(place, file).unwrap_or_else(|_| Box::new(io::empty())));
        let read = reader.read(buffer).unwrap_or_else(|error| {
            tracing::warn!(file = %file.display(), error = %error, "failed to read a rotated log");
            0
        });
        if read == 0 {
            self.files.pop_front();
            (self.open, self.skip) = (None, 0);
            return Read::End;
        }
        Read::Block { bytes: read, start: self.skip_in(&buffer[..read]) }
    }

    /// Where in this block the requested part begins.
    fn skip_in(&mut self, block: &[u8]) -> usize {
        let mut start = 0;
        while self.skip > 0 {
            let Some(end) = block[start..].iter().position(|byte| *byte == b'\n') else { return block.len() };
            start += end + 1;
            self.skip -= 1;
        }
        start
    }
}

/// The result of a read.
pub(super) enum Read {
    Block {
        bytes: usize,
        start: usize,
    },
    /// One file has ended.
    End,
    /// All files have ended.
    Nothing,
}

/// The names of the rotated files, the oldest first.
fn names(place: &Place) -> Result<Vec<String>, ReadError> {
    let dir = place.logs_dir.join(place.file.parent().expect("it was joined from three parts"));
    let live = place.file.file_name().and_then(|name| name.to_str()).expect("a number and `.log`");
    let entries = fs::list_dir(&dir)?.into_iter().map(|entry| entry.name);
    let moment = |name: &str| Some(name.strip_prefix(live)?.strip_prefix('.')?.to_owned());
    let is_moment = |text: &str| text.len() == 15 && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
    let mut names: Vec<String> = entries
        .filter(|name| moment(name).is_some_and(|rest| is_moment(rest.strip_suffix(PACKED).unwrap_or(&rest))))
        .collect();
    // The names are sorted, so a file precedes its compressed copy.
    names.dedup_by(|next, kept| next.strip_suffix(PACKED) == Some(kept));
    Ok(names.split_off(names.len().saturating_sub(MAX_FILES)))
}

fn open(place: &Place, file: &Path) -> Result<Box<dyn io::Read + Send>, ReadError> {
    let is_packed = is_packed(file);
    match fs::open_beneath(&place.logs_dir, file) {
        // It was compressed since it was listed.
        Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound && !is_packed => {
            let packed = format!("{}{PACKED}", file.display());
            Ok(Box::new(MultiGzDecoder::new(fs::open_beneath(&place.logs_dir, Path::new(&packed))?)))
        }
        Ok(opened) if is_packed => Ok(Box::new(MultiGzDecoder::new(opened))),
        Ok(opened) => Ok(Box::new(opened)),
        Err(error) => Err(error),
    }
}

fn is_packed(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "gz")
}

fn stem(name: &str) -> &str {
    name.strip_suffix(PACKED).unwrap_or(name)
}

/// The first bytes tell a file whatever it is called by now: they have the time of its first line in nanoseconds. Empty if it
/// cannot be read.
fn head_of(place: &Place, name: &str) -> Vec<u8> {
    let mut head = Vec::new();
    if let Ok(reader) = open(place, &place.file.with_file_name(name)) {
        // What is readable of a file that is not whole.
        let _ = reader.take(HEAD_BYTES).read_to_end(&mut head);
    }
    head
}

fn head_of_file(file: &File) -> io::Result<Vec<u8>> {
    let mut head = vec![0; usize::try_from(HEAD_BYTES).unwrap_or(usize::MAX)];
    let read = file.read_at(&mut head, 0)?;
    head.truncate(read);
    Ok(head)
}

/// As far as it is readable.
fn count_lines(place: &Place, file: &Path) -> u64 {
    let Ok(mut reader) = open(place, file) else { return 0 };
    let (mut buffer, mut lines) = (vec![0; BLOCK_BYTES], 0);
    while let Ok(read @ 1..) = reader.read(&mut buffer) {
        lines += buffer[..read].iter().filter(|byte| **byte == b'\n').count() as u64;
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::{fs as std_fs, io::Write as _, os::unix::fs::symlink, path::Path};

    use flate2::{Compression, write::GzEncoder};
    use futures_util::StreamExt as _;

    use super::super::{LogRequest, Streams, Timestamps, read};

    /// A log with three rotated files, and unrelated files.
    struct RotatedLogFixture(tempfile::TempDir);

    impl RotatedLogFixture {
        fn new() -> Self {
            let fixture = RotatedLogFixture(tempfile::tempdir().unwrap());
            let dir = fixture.dir();
            std_fs::create_dir_all(&dir).unwrap();
            let (one, two) = (lines(&["1", "2", "3"]), lines(&["4", "5"]));
            std_fs::write(dir.join("0.log.20261115-100000.gz"), packed(&one)).unwrap();
            std_fs::write(dir.join("0.log.20261115-110000"), &two).unwrap();
            // Its compression is not finished.
            std_fs::write(dir.join("0.log.20261115-110000.gz"), packed(&two)).unwrap();
            std_fs::write(dir.join("0.log.20261115-120000.tmp"), lines(&["no"])).unwrap();
            std_fs::write(dir.join("0.log.20261115-120000.gz"), b"torn").unwrap();
            std_fs::write(dir.join("10.log.20261115-100000"), lines(&["another run"])).unwrap();
            std_fs::write(fixture.0.path().join("secret"), lines(&["secret"])).unwrap();
            symlink(fixture.0.path().join("secret"), dir.join("0.log.20261115-130000")).unwrap();
            std_fs::write(dir.join("0.log"), lines(&["6", "7"])).unwrap();
            fixture
        }

        fn dir(&self) -> std::path::PathBuf {
            self.0.path().join("ns_pod_uid/app")
        }

        async fn shown(&self, tail: Option<u64>, since: Option<&str>) -> String {
            let request = LogRequest {
                logs_dir: self.0.path().to_owned(),
                pod_dir_name: "ns_pod_uid".to_owned(),
                container: "app".to_owned(),
                attempt: 0,
                tail,
                since: since.map(|moment| moment.parse().unwrap()),
                limit_bytes: None,
                timestamps: Timestamps::Hidden,
                streams: Streams::All,
                follow: None,
            };
            let chunks: Vec<_> = read(request).await.unwrap().map(Result::unwrap).collect().await;
            String::from_utf8(chunks.concat()).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
        }
    }

    fn lines(texts: &[&str]) -> Vec<u8> {
        texts.iter().flat_map(|text| format!("2026-11-15T10:00:0{text}Z stdout F {text}\n").into_bytes()).collect()
    }

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
        packer.write_all(bytes).unwrap();
        packer.finish().unwrap()
    }

    #[tokio::test]
    async fn long_tail_reads_rotated_logs() {
        let fixture = RotatedLogFixture::new();
        let whole = "1 2 3 4 5 6 7";
        for (tail, expected) in [
            (None, whole),
            (Some(0), ""),
            (Some(2), "6 7"),
            (Some(3), "5 6 7"),
            (Some(4), "4 5 6 7"),
            (Some(6), "2 3 4 5 6 7"),
            (Some(100), whole),
        ] {
            assert_eq!(fixture.shown(tail, None).await, expected, "{tail:?}");
        }
    }

    #[tokio::test]
    async fn rotated_logs_older_than_since_time_are_not_read() {
        let fixture = RotatedLogFixture::new();
        assert_eq!(fixture.shown(None, Some("2026-11-15T10:00:05Z")).await, "5 6 7");
        assert_eq!(fixture.shown(Some(6), Some("2026-11-15T10:00:05Z")).await, "5 6 7");
        // Its modification time is long before, whatever its lines say.
        let old = std_fs::File::options().append(true).open(fixture.dir().join("0.log.20261115-110000")).unwrap();
        old.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(fixture.shown(None, Some("2026-11-15T10:00:05Z")).await, "6 7");
    }

    #[tokio::test]
    async fn a_file_rotated_while_it_is_opened_is_shown_once() {
        let fixture = RotatedLogFixture::new();
        let dir = fixture.dir();
        let link = |from: &str, to: &Path| std_fs::hard_link(dir.join(from), to).unwrap();
        link("0.log", &dir.join("0.log.20261115-140000"));
        assert_eq!(fixture.shown(None, None).await, "1 2 3 4 5 6 7");
    }
}
