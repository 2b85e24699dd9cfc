//! What is counted every minute, and what counts as growth.

use std::{fmt, fs, path::Path};

use crate::{
    bench::{median, pid, resident_mb},
    e2e::node::Node,
};

/// The traces of removed pods reach their usual number within these minutes.
const WARM_UP: usize = 5;

#[derive(Clone, Debug)]
pub struct Figures {
    minute: u32,
    /// In the order of `NAMES`.
    values: [f64; NAMES.len()],
    /// Pods without a first line when they were removed.
    not_started: usize,
}

/// Name, and by how much its mean may be higher in the last third than in the first: a factor and an amount.
const NAMES: [(&str, f64, f64); 13] = [
    ("RSS MB", 1.10, 1.0),
    ("descriptors", 1.10, 5.0),
    ("threads", 1.20, 3.0),
    ("CPU s", 1.30, 0.5),
    ("files below root-dir", 1.15, 10.0),
    ("pod directories", 1.15, 5.0),
    ("log directories", 1.15, 5.0),
    ("log links", 1.15, 5.0),
    ("cgroups", 1.15, 10.0),
    ("containers", 1.15, 10.0),
    ("images", 1.0, 0.0),
    ("start ms, median", 1.5, 100.0),
    ("start ms, highest", 3.0, 1000.0),
];

impl Figures {
    pub const HEAD: &str = "| min | RSS MB | fds | threads | CPU s | files | pod dirs | log dirs | links | cgroups \
        | containers | images | start ms | highest | not started |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|";

    pub fn read(node: &Node, minute: u32, (starts, cpu_secs): (Vec<Option<f64>>, f64)) -> anyhow::Result<Figures> {
        let pid = pid(node)?;
        let not_started = starts.iter().filter(|start| start.is_none()).count();
        let started: Vec<f64> = starts.into_iter().flatten().collect();
        let highest = started.iter().copied().fold(0.0, f64::max);
        let count = |number: usize| number as f64;
        let agent = &node.agent;
        let lines = |text: String| count(text.lines().count());
        let values = [
            resident_mb(node)?,
            count(entries(Path::new(&format!("/proc/{pid}/fd")))),
            count(entries(Path::new(&format!("/proc/{pid}/task")))),
            cpu_secs,
            count(files_below(&agent.root_dir())),
            count(entries(&agent.root_dir().join("pods"))),
            count(entries(&agent.pod_logs_dir())),
            count(log_links(node).len()),
            count(cgroups(node).len()),
            lines(node.bed.ctr(["containers", "list", "-q"])?),
            lines(node.bed.ctr(["images", "list", "-q"])?),
            median(started).unwrap_or_default(),
            highest,
        ];
        Ok(Figures { minute, values, not_started })
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| {} |", self.minute)?;
        for value in self.values {
            if value < 100.0 && value.fract() > 0.0 {
                write!(f, " {value:.2} |")?;
            } else {
                write!(f, " {value:.0} |")?;
            }
        }
        write!(f, " {} |", self.not_started)
    }
}

/// Growth between the first and the last third of the run.
#[derive(Debug)]
pub struct Verdict {
    lines: Vec<String>,
    faults: Vec<String>,
}

impl Verdict {
    pub fn of(rows: &[Figures], left: &[String]) -> Verdict {
        let mut verdict = Verdict { lines: Vec::new(), faults: Vec::new() };
        if !left.is_empty() {
            verdict.faults.push(format!("{} traces of removed pods are left: {}", left.len(), left.join(", ")));
        }
        let not_started: usize = rows.iter().map(|row| row.not_started).sum();
        if not_started > 0 {
            verdict.faults.push(format!("{not_started} pods did not start within half a minute"));
        }
        let settled = rows.get(WARM_UP..).unwrap_or_default();
        let third = settled.len() / 3;
        if third == 0 {
            verdict.lines.push("too short to see growth".to_owned());
            return verdict;
        }
        let (first, last) = (&settled[..third], &settled[settled.len() - third..]);
        for (number, (name, factor, amount)) in NAMES.into_iter().enumerate() {
            let mean = |rows: &[Figures]| rows.iter().map(|row| row.values[number]).sum::<f64>() / rows.len() as f64;
            let (before, after) = (mean(first), mean(last));
            let line = format!("{name}: {before:.1} in the first third, {after:.1} in the last");
            if after > before * factor + amount {
                verdict.faults.push(line.clone());
            }
            verdict.lines.push(line);
        }
        verdict
    }

    pub fn is_good(&self) -> bool {
        self.faults.is_empty()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.lines.join("\n"))?;
        match self.is_good() {
            true => write!(f, "nothing grows, and nothing is left"),
            false => write!(f, "FAULTS:\n{}", self.faults.join("\n")),
        }
    }
}

/// What is left of pods on the node.
pub fn traces(node: &Node) -> anyhow::Result<Vec<String>> {
    let names = |kind: &str, dir: &Path| -> Vec<String> {
        let found = fs::read_dir(dir).into_iter().flatten().flatten();
        found.map(|entry| format!("{kind} {}", entry.file_name().to_string_lossy())).collect()
    };
    let mut left = names("directory", &node.agent.root_dir().join("pods"));
    left.extend(names("log directory", &node.agent.pod_logs_dir()));
    left.extend(log_links(node).into_iter().map(|link| format!("link {link}")));
    let is_pods = |path: &&String| path.rsplit('/').next().is_some_and(|name| name.starts_with("pod"));
    left.extend(cgroups(node).iter().filter(is_pods).map(|path| format!("cgroup {path}")));
    let containers = node.bed.ctr(["containers", "list", "-q"])?;
    left.extend(containers.lines().map(|id| format!("container {id}")));
    Ok(left)
}

fn entries(dir: &Path) -> usize {
    fs::read_dir(dir).map_or(0, Iterator::count)
}

/// Without following links. Content of mounts of pods counts, too.
fn files_below(dir: &Path) -> usize {
    let found = fs::read_dir(dir).into_iter().flatten().flatten();
    found
        .map(|entry| 1 + if entry.file_type().is_ok_and(|it| it.is_dir()) { files_below(&entry.path()) } else { 0 })
        .sum()
}

/// The links to logs are in a directory of the machine; ours lead to our logs.
fn log_links(node: &Node) -> Vec<String> {
    let logs = node.agent.pod_logs_dir();
    let links = fs::read_dir("/var/log/containers").into_iter().flatten().flatten();
    let is_ours = |link: &fs::DirEntry| fs::read_link(link.path()).is_ok_and(|target| target.starts_with(&logs));
    links.filter(is_ours).map(|link| link.file_name().to_string_lossy().into_owned()).collect()
}

/// Of all hierarchies.
fn cgroups(node: &Node) -> Vec<String> {
    let root = node.bed.layout.cgroup_root();
    let root = root.trim_start_matches('/');
    let mounts = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path().join(root));
    let mut found = Vec::new();
    let mut dirs: Vec<_> = mounts.chain([Path::new("/sys/fs/cgroup").join(root)]).collect();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                found.push(entry.path().display().to_string());
                dirs.push(entry.path());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(values: impl Fn(u32) -> f64) -> Vec<Figures> {
        let row = |minute| Figures { minute, values: [values(minute); NAMES.len()], not_started: 0 };
        (1..=35).map(row).collect()
    }

    #[test]
    fn growth_and_leftovers_are_faults() {
        assert!(Verdict::of(&rows(|_| 50.0), &[]).is_good());
        assert!(!Verdict::of(&rows(|minute| 50.0 + f64::from(minute)), &[]).is_good());
        assert!(!Verdict::of(&rows(|_| 50.0), &["directory u1".to_owned()]).is_good());
    }

    #[test]
    fn growth_of_the_first_minutes_does_not_count() {
        let warm = |minute: u32| if minute <= 5 { f64::from(minute) } else { 50.0 };
        assert!(Verdict::of(&rows(warm), &[]).is_good());
    }
}
