//! Go's syntax of command-line flags: `--a=b`, `--a b`, `--a`, `-v2`, `--`.
//!
//! Owns: which word belongs to which flag; `_` for `-` in names. Never: what a flag does.
//! Upstream: `pflag.FlagSet.Parse`, `cliflag.WordSepNormalizeFunc`.

use serde_json::{Map, Value};

use rubelet_core::config::FlagValue;

use super::{
    flags::{self, Flag, Target},
    values,
};

/// A parsed command line, before any file is read.
#[derive(Debug, Default, PartialEq)]
pub struct Arguments {
    /// Values of `Flags` members, by flag name.
    pub own: Map<String, Value>,
    /// Values of KubeletConfiguration fields.
    pub fields: Vec<FlagValue>,
    /// Values of flags without effect, by flag name.
    pub idle: Map<String, Value>,
    /// Upstream's deprecation warnings, once each.
    pub notices: Vec<String>,
    /// Words that belong to no flag.
    pub positional: Vec<String>,
    pub help: bool,
    /// `true`, `"raw"` or a version to print.
    pub version: Option<Value>,
}

/// All errors at once.
pub(super) fn parse(words: &[String]) -> Result<Arguments, Vec<String>> {
    let mut reading = Reading { words: words.iter(), found: Arguments::default(), errors: Vec::new() };
    reading.read();
    if reading.errors.is_empty() { Ok(reading.found) } else { Err(reading.errors) }
}

struct Reading<'a> {
    words: std::slice::Iter<'a, String>,
    found: Arguments,
    errors: Vec<String>,
}

impl Reading<'_> {
    fn read(&mut self) {
        while let Some(word) = self.words.next() {
            match word.strip_prefix("--") {
                Some("") => self.found.positional.extend(self.words.by_ref().cloned()),
                Some(long) => self.long(word, long),
                None => match word.strip_prefix('-') {
                    Some("") | None => self.found.positional.push(word.clone()),
                    Some(shorts) => self.shorts(shorts),
                },
            }
        }
    }

    fn long(&mut self, word: &str, long: &str) {
        if long.starts_with(['-', '=']) {
            self.errors.push(format!("bad flag syntax: {word}"));
            return;
        }
        let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
        let Some(flag) = flags::by_name(&name.replace('_', "-")) else {
            self.errors.push(format!("unknown flag: --{name}"));
            // The next word is likely its value; parsing it as a command would give a second, wrong error.
            if value.is_none() && self.words.as_slice().first().is_some_and(|next| !next.starts_with('-')) {
                self.words.next();
            }
            return;
        };
        match value.or(flag.kind.without_value()).or_else(|| self.words.next().map(String::as_str)) {
            Some(value) => self.set(flag, value),
            None => self.errors.push(format!("flag needs an argument: --{name}")),
        }
    }

    /// One-letter flags, possibly several in a word: `-v2`, `-v=2`, `-hv 2`.
    fn shorts(&mut self, shorts: &str) {
        let mut rest = shorts;
        while let Some(short) = rest.chars().next() {
            let Some(flag) = flags::by_short(short) else {
                self.errors.push(format!("unknown shorthand flag: {short:?} in -{rest}"));
                return;
            };
            let after = &rest[short.len_utf8()..];
            if let Some(value) = after.strip_prefix('=').filter(|value| !value.is_empty()) {
                self.set(flag, value);
                return;
            }
            if let Some(value) = flag.kind.without_value() {
                self.set(flag, value);
                rest = after;
                continue;
            }
            let value = if after.is_empty() { self.words.next().map(String::as_str) } else { Some(after) };
            match value {
                Some(value) => self.set(flag, value),
                None => self.errors.push(format!("flag needs an argument: {short:?} in -{rest}")),
            }
            return;
        }
    }

    fn set(&mut self, flag: &'static Flag, text: &str) {
        let before = match flag.target {
            Target::Own => self.found.own.get(flag.name).cloned(),
            Target::Field(_) => self.given(flag).map(|given| given.value.clone()),
            Target::Nothing(_) | Target::Help | Target::PrintVersion => None,
        };
        let value = match values::parse(flag.kind, text, before) {
            Ok(value) => value,
            Err(error) => {
                let name = flag.short.map(|short| format!("-{short}, ")).unwrap_or_default() + "--" + flag.name;
                self.errors.push(format!("invalid argument {text:?} for {name:?} flag: {error}"));
                return;
            }
        };
        if let Some(advice) = flag.deprecated {
            let notice = format!("Flag --{} has been deprecated, {advice}", flag.name);
            if !self.found.notices.contains(&notice) {
                self.found.notices.push(notice);
            }
        }
        match flag.target {
            Target::Own => {
                self.found.own.insert(flag.name.to_owned(), value);
            }
            Target::Field(_) if value.is_null() => {}
            Target::Field(path) => match self.given(flag) {
                Some(given) => given.value = value,
                None => self.found.fields.push(FlagValue { flag: flag.name.to_owned(), field: path, value }),
            },
            Target::Nothing(_) => {
                self.found.idle.insert(flag.name.to_owned(), value);
            }
            Target::Help => self.found.help = value == Value::Bool(true),
            Target::PrintVersion => self.found.version = Some(value).filter(|value| *value != Value::Bool(false)),
        }
    }

    fn given(&mut self, flag: &Flag) -> Option<&mut FlagValue> {
        self.found.fields.iter_mut().find(|given| given.flag == flag.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> String {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        match parse(&words) {
            Err(errors) => errors.join("\n"),
            Ok(found) => {
                let own = found.own.iter().map(|(name, value)| format!("{name}={value}"));
                let fields = found.fields.iter().map(|given| format!("{}={}", given.field, given.value));
                let version = found.version.iter().map(|version| format!("version={version}"));
                let help = found.help.then(|| "help".to_owned());
                let positional = found.positional.iter().map(|word| format!("({word})"));
                own.chain(fields).chain(version).chain(help).chain(positional).collect::<Vec<_>>().join(" ")
            }
        }
    }

    #[test]
    fn all_forms_of_go_flags_are_read() {
        let table = [
            ("--port=1 --max_pods 5", "port=1 maxPods=5"),
            ("--port 1 --port=2", "port=2"),
            ("--fail-swap-on", "failSwapOn=true"),
            ("--fail-swap-on=false", "failSwapOn=false"),
            ("--fail-swap-on false", "failSwapOn=true (false)"),
            ("-v 4", "logging.verbosity=4"),
            ("-v4", "logging.verbosity=4"),
            ("-v=4", "logging.verbosity=4"),
            ("--v=4", "logging.verbosity=4"),
            ("-hv2", "logging.verbosity=2 help"),
            ("--help", "help"),
            ("--version", "version=true"),
            ("--version=raw", "version=\"raw\""),
            ("--version=false", ""),
            ("--config=a=b", "config=\"a=b\""),
            ("--config --port", "config=\"--port\""),
            ("-- --port", "(--port)"),
            ("run -", "(run) (-)"),
            ("--cluster-dns=a,b --cluster-dns c", "clusterDNS=[\"a\",\"b\",\"c\"]"),
            ("--node-labels=a=b --node_labels=c", "node-labels={\"a\":\"b\",\"c\":\"\"}"),
            ("--address=", ""),
            ("--storage-driver-user=x", ""),
        ];
        for (line, expected) in table {
            assert_eq!(parsed(line), expected, "{line}");
        }
    }

    #[test]
    fn all_errors_come_at_once_in_upstreams_words() {
        insta::assert_snapshot!(parsed("--nope --also=1 --wrong value --port=x -z --=1 -v=x --config"), @r#"
        unknown flag: --nope
        unknown flag: --also
        unknown flag: --wrong
        invalid argument "x" for "--port" flag: strconv.ParseInt: parsing "x": invalid syntax
        unknown shorthand flag: 'z' in -z
        bad flag syntax: --=1
        invalid argument "x" for "-v, --v" flag: strconv.ParseUint: parsing "x": invalid syntax
        flag needs an argument: --config
        "#);
    }

    #[test]
    fn a_deprecated_flag_is_noticed_once() {
        let words = ["--port=1", "--port=2", "--provider-id=x"].map(str::to_owned);
        let notices = parse(&words).unwrap().notices;
        insta::assert_snapshot!(notices.join("\n"), @"Flag --port has been deprecated, This parameter should be set via the config file specified by the Kubelet's --config flag. See https://kubernetes.io/docs/tasks/administer-cluster/kubelet-config-file/ for more information.");
    }
}
