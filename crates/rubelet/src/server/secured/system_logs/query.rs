//! The query parameters of `/logs/?query=…`.
//!
//! Owns: its options and their bounds, with upstream's texts. Never: reads a log.
//! Upstream: `newNodeLogQuery`, `validate`, `getLoggingCmd` of `kubelet_server_journal.go`. journalctl validates the pattern.

use jiff::Timestamp;
use serde_json::json;

const SERVICES_MAX: usize = 4;
const SERVICE_MAX_BYTES: usize = 256;
const TAIL_MAX_LINES: i64 = 100_000;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Query {
    pub services: Vec<String>,
    pub files: Vec<String>,
    since: Option<(Timestamp, String)>,
    until: Option<(Timestamp, String)>,
    tail_lines: Option<i64>,
    boot: Option<i64>,
    pattern: String,
}

impl Query {
    /// `None`: no query, so a file is requested.
    pub(crate) fn parse(query: &str) -> Result<Option<Query>, Vec<String>> {
        let pairs: Vec<_> = form_urlencoded::parse(query.as_bytes()).collect();
        let first = |name: &str| pairs.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value.as_ref());
        let asked: Vec<String> =
            pairs.iter().filter(|(key, _)| key == "query").map(|(_, value)| value.to_string()).collect();
        let mut problems = Vec::new();
        let (files, others): (Vec<String>, Vec<String>) =
            asked.iter().cloned().partition(|it| it.contains(['/', '\\']));
        let services: Vec<String> = others.into_iter().filter(|service| !service.trim().is_empty()).collect();
        if !asked.is_empty() && files.is_empty() && services.is_empty() {
            problems.push(format!("query: Invalid value: {}: may not be empty", json!(asked)));
        }
        let mut time = |name: &str| {
            let value = first(name);
            let parsed = (!value.is_empty()).then(|| value.parse::<Timestamp>());
            match parsed? {
                Ok(time) => Some((time, value.to_owned())),
                Err(_) => {
                    problems.push(format!("{name}: Invalid value: {value:?}: invalid time format"));
                    None
                }
            }
        };
        let (since, until) = (time("sinceTime"), time("untilTime"));
        let mut number = |name: &str| match first(name) {
            "" => None,
            value => atoi(value).map_err(|why| problems.push(format!("{name}: Invalid value: {value:?}: {why}"))).ok(),
        };
        let (boot, tail_lines) = (number("boot"), number("tailLines"));
        let query = Query { services, files, since, until, tail_lines, boot, pattern: first("pattern").to_owned() };
        match problems.is_empty() {
            true => Ok((query != Query::default()).then_some(query)),
            false => Err(problems),
        }
    }

    /// Its validation errors, except for the file it may name.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems: Vec<String> = self.services.iter().filter_map(|service| service_problem(service)).collect();
        if self.services.len() > SERVICES_MAX {
            problems.push(format!("query: Too many: {}: must have at most {SERVICES_MAX} items", self.services.len()));
        }
        let files = json!(self.files);
        match (self.files.len(), self.services.len()) {
            (0, 0) => problems.push("query: Required value: cannot be empty with options".to_owned()),
            (1.., 1..) => {
                let both = format!("[{}], [{}]", self.files.join(" "), self.services.join(" "));
                problems.push(format!("query: Invalid value: {both:?}: cannot specify a file and service"));
            }
            (2.., 0) => problems.push(format!("query: Invalid value: {files}: cannot specify more than one file")),
            (1, 0) if self.has_options() => {
                problems.push(format!("query: Invalid value: {files}: cannot specify file with options"));
            }
            _ => {}
        }
        if let (Some((since, _)), Some((until, told))) = (&self.since, &self.until)
            && since > until
        {
            problems.push(format!("untilTime: Invalid value: {told:?}: must be after `sinceTime`"));
        }
        if let Some(boot @ 1..) = self.boot {
            problems.push(format!("boot: Invalid value: {boot}: must be less than 1"));
        }
        if let Some(lines) = self.tail_lines.filter(|lines| !(0..=TAIL_MAX_LINES).contains(lines)) {
            let range = format!("must be between 0 and {TAIL_MAX_LINES}, inclusive");
            problems.push(format!("tailLines: Invalid value: {lines}: {range}"));
        }
        problems
    }

    /// The single file it names.
    pub(super) fn file(&self) -> Option<&str> {
        self.files.first().map(String::as_str)
    }

    pub(super) fn has_options(&self) -> bool {
        let plain = Query { services: self.services.clone(), files: self.files.clone(), ..Query::default() };
        *self != plain
    }

    pub(super) fn is_of_this_boot(&self) -> bool {
        self.boot.unwrap_or(0) == 0
    }

    /// journalctl's arguments. Each value is one argument, whatever it contains.
    pub(super) fn arguments(&self, services: &[String]) -> Vec<String> {
        // Upstream omits the zone, and journalctl then uses the node's own.
        let time = |(time, _): &(Timestamp, String)| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
        let mut arguments = ["--utc", "--no-pager", "--output=short-precise"].map(str::to_owned).to_vec();
        arguments.extend(self.since.as_ref().map(|since| format!("--since={}", time(since))));
        arguments.extend(self.until.as_ref().map(|until| format!("--until={}", time(until))));
        if let Some(lines) = self.tail_lines {
            arguments.extend(["--pager-end".to_owned(), format!("--lines={lines}")]);
        }
        arguments.extend(services.iter().map(|service| format!("--unit={service}")));
        arguments.extend((!self.pattern.is_empty()).then(|| format!("--grep={}", self.pattern)));
        if let Some(boot) = self.boot {
            arguments.extend(["--boot".to_owned(), boot.to_string()]);
        }
        arguments
    }
}

/// One problem as it is, several in brackets.
pub(super) fn joined(problems: &[String]) -> String {
    match problems {
        [only] => only.clone(),
        several => format!("[{}]", several.join(", ")),
    }
}

pub(super) fn invalid_file(file: &str, why: &str) -> String {
    format!("query: Invalid value: {}: {why}", json!([file]))
}

fn service_problem(service: &str) -> Option<String> {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
    let why = if service.len() > SERVICE_MAX_BYTES {
        format!("length must be less than {SERVICE_MAX_BYTES}")
    } else if !service.bytes().all(is_safe) {
        "input contains unsupported characters".to_owned()
    } else {
        return None;
    };
    Some(format!("query: Invalid value: {service:?}: {why}"))
}

fn atoi(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| {
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let why = if is_number { "value out of range" } else { "invalid syntax" };
        format!("strconv.Atoi: parsing {text:?}: {why}")
    })
}
