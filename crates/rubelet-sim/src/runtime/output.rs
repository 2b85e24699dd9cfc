//! The output of containers: numbered lines in their logs.
//!
//! Owns: which file the runtime has open for each container, whatever it is called by now, and which lines it has. Lines are
//! written every second, and before somebody looks. A container prints nothing while the disk is full.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::simulation::SimState;

/// Of a container that runs.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// A log is full after twenty lines.
pub(crate) const MAX_LOG_BYTES: u64 = 200;

/// By container id.
pub(crate) type Outputs = BTreeMap<String, Output>;

#[derive(Clone, Debug)]
pub(crate) struct Output {
    /// The file that is open, by its present name.
    file: PathBuf,
    /// How many were written.
    lines: u64,
    next_line_at: Duration,
    /// Rotated files of another container: a runtime that lost its state may make the same attempt again.
    earlier: BTreeSet<PathBuf>,
}

impl SimState {
    /// The container has started, or its log was reopened: the file exists.
    pub(crate) fn open_log(&mut self, id: &str, path: &Path) {
        self.print_lines();
        let now = self.now;
        let next_line_at = now.saturating_add(LINE_EVERY);
        let earlier = self.disk.files_named(path).into_iter().map(|(file, _)| stem(&file)).collect();
        let output = self.runtime.outputs.entry(id.to_owned());
        output.or_insert(Output { file: path.to_owned(), lines: 0, next_line_at, earlier }).file = path.to_owned();
    }

    /// The runtime goes on writing to the file.
    pub(crate) fn rename_log(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.print_lines();
        self.disk.rename(from, to)?;
        for output in self.runtime.outputs.values_mut().filter(|output| output.file == from) {
            output.file = to.to_owned();
        }
        self.check_log(&live_name(from));
        Ok(())
    }

    /// The compressed form is another file: what the runtime writes to the old one is lost.
    pub(crate) fn compress_log(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.print_lines();
        self.disk.rename(from, to)?;
        self.check_log(&live_name(from));
        Ok(())
    }

    /// Every running container has written what it has printed by now.
    pub(crate) fn print_lines(&mut self) {
        let is_running = |id: &String| self.runtime.picture.containers.get(id).is_some_and(|it| it.is_running());
        let ended: Vec<String> = self.runtime.outputs.keys().filter(|id| !is_running(id)).cloned().collect();
        for id in ended {
            self.runtime.outputs.remove(&id);
        }
        let now = self.now;
        for (id, output) in &mut self.runtime.outputs {
            let mut text = String::new();
            while output.next_line_at <= now {
                output.next_line_at = output.next_line_at.saturating_add(LINE_EVERY);
                if !self.disk.full {
                    output.lines += 1;
                    text.push_str(&line(output.lines));
                }
            }
            if !text.is_empty() && self.disk.append(&output.file, text.as_bytes()).is_err() {
                self.rules.line_lost(now, id, &output.file);
            }
        }
    }

    /// A container suddenly prints this many lines.
    #[cfg(test)]
    pub(crate) fn print_burst(&mut self, id: &str, lines: u64) {
        self.print_lines();
        let Some(output) = self.runtime.outputs.get_mut(id) else { return };
        let text: String = (output.lines.saturating_add(1)..).map(line).take(lines as usize).collect();
        output.lines += lines;
        let file = output.file.clone();
        if self.disk.append(&file, text.as_bytes()).is_err() {
            self.rules.line_lost(self.now, id, &file);
        }
    }

    /// The files of a log hold all lines once, from some line to the last.
    pub(crate) fn check_log(&mut self, live: &Path) {
        self.print_lines();
        let open = self.runtime.picture.containers.values().find(|it| it.log_path == live && it.is_running());
        let Some((id, output)) = open.and_then(|it| Some((it.id.clone(), self.runtime.outputs.get(&it.id)?))) else {
            return;
        };
        let (lines, earlier) = (output.lines, output.earlier.clone());
        let mut files = self.disk.files_named(live);
        files.retain(|(file, _)| file == live || !earlier.contains(&stem(file)));
        let text: String = files.iter().map(|(_, content)| String::from_utf8_lossy(content).into_owned()).collect();
        let first = (lines + 1).saturating_sub((text.len() / line(0).len()) as u64);
        let expected: String = (first..=lines).map(line).collect();
        if text != expected {
            let names: Vec<_> = files.iter().map(|(path, _)| path.display().to_string()).collect();
            self.rules.log_broken(self.now, &id, &names.join(", "));
        }
    }
}

/// `0.log` of `0.log.20260601-120000`.
fn live_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let live: Vec<_> = name.splitn(3, '.').take(2).collect();
    path.with_file_name(live.join("."))
}

/// Without the suffix of a compressed file.
fn stem(file: &Path) -> PathBuf {
    let is_compressed = file.extension().is_some_and(|extension| extension == "gz");
    if is_compressed { file.with_extension("") } else { file.to_owned() }
}

fn line(number: u64) -> String {
    format!("{number:09}\n")
}
