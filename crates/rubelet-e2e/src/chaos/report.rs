//! The table: a row per fault, with pass or fail in each column.
//!
//! Owns: the limits, and how figures are shown.

use std::time::Duration;

use super::{
    RECOVERY,
    controls::Starts,
    faults::{Fault, StartTimes},
    monitor::Peaks,
};

/// Control pods may start this much later during a fault that has nothing to do with them.
const LATER_SECS: f64 = 1.0;

const HEAD: &str = "| fault | lease age, max | restarts | wrong at the end | start before: median, max | start during: median, max \
     | agent's memory, max | all right after | notes |\n|---|---|---|---|---|---|---|---|---|";

#[derive(Debug)]
pub struct Row {
    pub fault: &'static Fault,
    pub peaks: Peaks,
    /// Of steady pods.
    pub restarts: u64,
    /// Things that are wrong at the end of the recovery.
    pub wrong: usize,
    pub usual: Starts,
    pub during: Starts,
    pub recovery: Duration,
    pub note: String,
}

/// A figure, and whether it is within its limit; without one it is for information.
struct Cell(String, Option<bool>);

impl Row {
    /// The exam itself failed.
    pub fn broken(fault: &'static Fault, error: &str) -> Self {
        Row {
            fault,
            peaks: Peaks::default(),
            restarts: 0,
            wrong: 1,
            usual: Starts::default(),
            during: Starts::default(),
            recovery: RECOVERY,
            note: error.replace('\n', " ").replace('|', "/").chars().take(600).collect(),
        }
    }

    fn cells(&self) -> [Cell; 8] {
        [
            Cell(format!("{:.1} s", self.peaks.lease_secs), Some(self.peaks.lease_secs <= self.fault.lease_secs)),
            Cell(self.restarts.to_string(), Some(self.restarts == 0)),
            Cell(self.wrong.to_string(), Some(self.wrong == 0)),
            Cell(shown(&self.usual), None),
            Cell(shown(&self.during), self.starts_are_usual()),
            Cell(format!("{:.0} MB", self.peaks.resident_mb), None),
            Cell(format!("{:.1} s", self.recovery.as_secs_f64()), Some(self.recovery <= RECOVERY && self.wrong == 0)),
            Cell(self.note.clone(), None),
        ]
    }

    /// Both values are at most a second later. Without a limit where the fault stops what every start needs.
    fn starts_are_usual(&self) -> Option<bool> {
        if self.fault.starts == StartTimes::Delayed {
            return None;
        }
        let later = |usual: Option<f64>, during: Option<f64>| match (usual, during) {
            (Some(usual), Some(during)) => during <= usual + LATER_SECS,
            _ => false,
        };
        let medians = later(self.usual.median(), self.during.median());
        Some(medians && later(self.usual.max(), self.during.max()))
    }

    fn has_failed(&self) -> bool {
        self.cells().iter().any(|cell| cell.1 == Some(false))
    }

    pub fn to_markdown(&self) -> String {
        let cells = self.cells().map(|Cell(text, verdict)| match verdict {
            Some(true) => format!("{text} ok"),
            Some(false) => format!("{text} **FAIL**"),
            None => text,
        });
        format!("| {} | {} |", self.fault.name, cells.join(" | "))
    }
}

fn shown(starts: &Starts) -> String {
    let secs = |value: Option<f64>| value.map_or("never".to_owned(), |secs| format!("{secs:.1} s"));
    format!("{}, {} ({})", secs(starts.median()), secs(starts.max()), starts.secs.len() + starts.waiting)
}

#[derive(Debug)]
pub struct Report {
    agent: &'static str,
    pods: usize,
    rows: Vec<Row>,
}

impl Report {
    pub fn new(agent: &'static str, pods: usize) -> Self {
        Report { agent, pods, rows: Vec::new() }
    }

    pub fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    pub fn has_failures(&self) -> bool {
        self.rows.iter().any(Row::has_failed)
    }

    pub fn to_markdown(&self) -> String {
        let rows: Vec<String> = self.rows.iter().map(Row::to_markdown).collect();
        format!("{}, {} steady pods\n\n{HEAD}\n{}\n", self.agent, self.pods, rows.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::faults;

    fn row(secs: &[f64], waiting: usize) -> Row {
        Row {
            fault: faults::named("hung-mount").unwrap(),
            peaks: Peaks { lease_secs: 9.0, resident_mb: 20.0 },
            restarts: 0,
            wrong: 0,
            usual: Starts { secs: vec![0.5, 0.6, 0.7], waiting: 0 },
            during: Starts { secs: secs.to_vec(), waiting },
            recovery: Duration::from_secs(3),
            note: String::new(),
        }
    }

    #[test]
    fn row_fails_by_each_column_alone() {
        assert!(!row(&[0.6, 1.5, 1.6], 0).has_failed());
        assert!(row(&[0.6, 1.7, 1.7], 0).has_failed(), "median");
        assert!(row(&[0.6, 0.6, 1.8], 0).has_failed(), "max");
        assert!(row(&[0.6, 0.6, 0.6], 1).has_failed(), "one never ran");
        assert!(row(&[], 0).has_failed(), "none was created");
        assert!(Row { restarts: 1, ..row(&[0.6], 0) }.has_failed());
        assert!(Row { wrong: 1, ..row(&[0.6], 0) }.has_failed());
        assert!(Row { recovery: Duration::from_secs(31), ..row(&[0.6], 0) }.has_failed());
        assert!(Row { peaks: Peaks { lease_secs: 15.1, resident_mb: 1.0 }, ..row(&[0.6], 0) }.has_failed());
    }

    #[test]
    fn row_shows_figures_and_verdicts() {
        let shown = row(&[0.6, 0.6], 1).to_markdown();
        assert_eq!(
            shown,
            "| hung-mount | 9.0 s ok | 0 ok | 0 ok | 0.6 s, 0.7 s (3) | 0.6 s, never (3) **FAIL** | 20 MB | 3.0 s ok |  |"
        );
    }
}
