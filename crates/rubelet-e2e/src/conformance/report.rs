//! The report of the suite.
//!
//! Owns: reading ginkgo's report, and separating failures because the agent serves no logs, exec or port-forward
//! from failures of running pods.

use std::{fs, io::BufReader, path::Path};

use anyhow::Context as _;
use serde::Deserialize;

/// Parts of errors from requests that the API server passes on to the agent's own server. Its answer to a client that asks
/// for logs hides the cause; `get pods` in it is the request for logs.
const AGENT_SERVER: &[&str] = &[
    "/containerLogs/",
    "/log?container=",
    "/exec/",
    "/exec?",
    "/attach/",
    "/portForward/",
    "/stats/summary",
    "/metrics",
    "/configz",
    "failed to get logs from",
    "failed to get output for container",
    "has prevented the request from succeeding (get pods",
    "error dialing backend",
    "unable to upgrade connection",
];

/// Enough of an error to tell it from others.
const MESSAGE_CHARS: usize = 200;

#[derive(Debug, PartialEq)]
pub struct Report {
    minutes: f64,
    passed: usize,
    /// Specs that skipped themselves on this cluster.
    skipped: usize,
    /// Specs that were running when the run was interrupted.
    interrupted: usize,
    failures: Vec<Failed>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Failed {
    lacks: Lack,
    name: String,
    /// One line.
    message: String,
}

/// What the spec needs to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lack {
    Behaviour,
    /// Logs, exec, attach, port-forward, metrics.
    AgentServer,
}

/// The used part of ginkgo's report.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SuiteReport {
    /// In nanoseconds.
    run_time: f64,
    #[serde(default)]
    spec_reports: Vec<SpecReport>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SpecReport {
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_type: String,
    #[serde(default)]
    leaf_node_text: String,
    state: String,
    #[serde(default)]
    failure: Failure,
    /// None for what focus and skip left out.
    #[serde(default)]
    num_attempts: u32,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Failure {
    #[serde(default)]
    message: String,
}

impl Report {
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let file = BufReader::new(fs::File::open(path)?);
        let suites = serde_json::from_reader(file).with_context(|| format!("read {}", path.display()))?;
        Ok(Report::of(suites))
    }

    fn of(suites: Vec<SuiteReport>) -> Self {
        let mut report = Report { minutes: 0.0, passed: 0, skipped: 0, interrupted: 0, failures: Vec::new() };
        for suite in suites {
            report.minutes += suite.run_time / 60e9;
            for spec in suite.spec_reports {
                match spec.state.as_str() {
                    "passed" if spec.leaf_node_type == "It" => report.passed += 1,
                    "skipped" if spec.num_attempts > 0 => report.skipped += 1,
                    "passed" | "skipped" | "pending" => {}
                    "interrupted" => report.interrupted += 1,
                    // failed, panicked, timedout, aborted
                    _ => report.failures.push(Failed::of(&spec)),
                }
            }
        }
        report.failures.sort();
        report
    }

    pub fn has_failures(&self) -> bool {
        !self.failures.is_empty()
    }

    pub fn to_markdown(&self, agent: &str) -> String {
        let Report { minutes, passed, skipped, interrupted, failures } = self;
        let (server, own): (Vec<_>, Vec<_>) = failures.iter().partition(|failed| failed.lacks == Lack::AgentServer);
        let mut text = format!(
            "| agent | passed | failed | of these, for want of the agent's server | do not apply | minutes |\n\
             |---|---|---|---|---|---|\n\
             | {agent} | {passed} | {} | {} | {skipped} | {minutes:.0} |\n",
            failures.len(),
            server.len()
        );
        if *interrupted > 0 {
            text.push_str(&format!(
                "\nThe run was ended early: {interrupted} specs were under way, others never began.\n"
            ));
        }
        for (title, failures) in [("Failed", own), ("Failed for want of the agent's server", server)] {
            if !failures.is_empty() {
                text.push_str(&format!("\n{title}:\n\n"));
            }
            for Failed { name, message, .. } in failures {
                text.push_str(&format!("- {name}\n  `{message}`\n"));
            }
        }
        text
    }
}

impl Failed {
    fn of(spec: &SpecReport) -> Self {
        let texts = spec.container_hierarchy_texts.iter().flatten().chain([&spec.leaf_node_text]);
        let name = texts.map(String::as_str).filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ");
        let message = &spec.failure.message;
        let lacks = match AGENT_SERVER.iter().any(|part| message.contains(part)) {
            true => Lack::AgentServer,
            false => Lack::Behaviour,
        };
        let words = message.split_whitespace().collect::<Vec<_>>().join(" ").replace('`', "'");
        Failed {
            lacks,
            name: if name.is_empty() { spec.leaf_node_type.clone() } else { name },
            message: words.chars().take(MESSAGE_CHARS).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_the_agents_server_are_listed_apart() {
        let suites = serde_json::from_str(
            r#"[{ "RunTime": 90000000000, "SpecReports": [
                { "ContainerHierarchyTexts": null, "LeafNodeType": "ReportBeforeSuite", "State": "passed" },
                { "ContainerHierarchyTexts": ["[sig-node] A"], "LeafNodeType": "It", "LeafNodeText": "works",
                  "State": "passed", "NumAttempts": 1 },
                { "ContainerHierarchyTexts": ["[sig-node] A"], "LeafNodeType": "It", "LeafNodeText": "was left out",
                  "State": "skipped" },
                { "ContainerHierarchyTexts": ["[sig-node] A"], "LeafNodeType": "It", "LeafNodeText": "needs Windows",
                  "State": "skipped", "NumAttempts": 1 },
                { "ContainerHierarchyTexts": ["[sig-node] A", "b"], "LeafNodeType": "It", "LeafNodeText": "logs",
                  "State": "failed", "NumAttempts": 1,
                  "Failure": { "Message": "Get \"https://10.0.0.1:1/containerLogs/x\":\n dial tcp" } },
                { "ContainerHierarchyTexts": ["[sig-node] A"], "LeafNodeType": "It", "LeafNodeText": "hangs",
                  "State": "timedout", "NumAttempts": 1, "Failure": { "Message": "Timed out" } },
                { "ContainerHierarchyTexts": ["[sig-node] A"], "LeafNodeType": "It", "LeafNodeText": "was cut off",
                  "State": "interrupted", "NumAttempts": 1, "Failure": { "Message": "Interrupted by User" } }
            ] }]"#,
        )
        .unwrap();
        assert_eq!(
            Report::of(suites).to_markdown("x"),
            "| agent | passed | failed | of these, for want of the agent's server | do not apply | minutes |\n\
             |---|---|---|---|---|---|\n\
             | x | 1 | 2 | 1 | 1 | 2 |\n\
             \nThe run was ended early: 1 specs were under way, others never began.\n\
             \nFailed:\n\n- [sig-node] A hangs\n  `Timed out`\n\
             \nFailed for want of the agent's server:\n\n\
             - [sig-node] A b logs\n  `Get \"https://10.0.0.1:1/containerLogs/x\": dial tcp`\n"
        );
    }
}
