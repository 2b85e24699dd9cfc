//! Every flag with its value, as `/flagz` shows them.
//!
//! Owns: the text of each kind, and which values are hidden. Never: serves it (`server/secured/zpages.rs`).
//! Upstream: `String()` of `pflag`, `component-base/cli/flag` and `pkg/util/flag`; `flagz.NamedFlagSetsReader`. Unlike upstream's, the
//! headers of `--manifest-url-header` are a secret.

use std::collections::BTreeMap;

use rubelet_core::config::{KubeletConfiguration, at};
use serde_json::{Map, Value};

use super::{
    flags::{self, Flag, Kind, Target},
    options::Flags,
};

const SECRET: &str = "CLASSIFIED";

/// `config` is the configuration from flags alone; `idle` the values of flags without effect.
pub(super) fn shown(
    own: &Flags,
    config: &KubeletConfiguration,
    idle: &Map<String, Value>,
) -> BTreeMap<&'static str, String> {
    let own = serde_json::to_value(own).expect("flags have only string keys");
    let fields = serde_json::to_value(config).expect("a configuration has only string keys");
    let value = |flag: &Flag| match flag.target {
        Target::Field(path) => text(flag.kind, at(&fields, path).unwrap_or(&Value::Null)),
        Target::Own => text(flag.kind, &own[flag.name]),
        Target::Nothing(default) => {
            idle.get(flag.name).map_or_else(|| default.to_owned(), |value| text(flag.kind, value))
        }
        Target::Help | Target::PrintVersion => "false".to_owned(),
    };
    let hide =
        |flag: &Flag, value: String| if flag.is_secret() && !value.is_empty() { SECRET.to_owned() } else { value };
    flags::all().map(|flag| (flag.name, hide(flag, value(flag)))).collect()
}

fn text(kind: Kind, value: &Value) -> String {
    match kind {
        Kind::Text | Kind::Bool | Kind::Int32 | Kind::Int64 | Kind::Duration | Kind::Ip => word(value),
        Kind::Quantity | Kind::Level | Kind::Version => word(value),
        Kind::List => format!("[{}]", joined(items(value).map(|item| csv(&word(item))))),
        Kind::Map | Kind::Pair | Kind::Labels | Kind::Gates => pairs(value, "="),
        Kind::Thresholds => pairs(value, "<"),
        Kind::Headers => {
            let members = value.as_object().into_iter().flatten();
            joined(members.flat_map(|(name, values)| items(values).map(move |value| format!("{name}:{}", word(value)))))
        }
        Kind::Taints => joined(items(value).map(|taint| {
            let [key, value, effect] = ["key", "value", "effect"].map(|name| word(&taint[name]));
            format!("{key}={value}:{effect}")
        })),
        Kind::ReservedMemory => {
            let mut nodes: Vec<String> = items(value)
                .map(|node| format!("{}:{}", word(&node["numaNode"]), pairs(&node["limits"], "=")))
                .collect();
            nodes.sort();
            joined(nodes)
        }
        Kind::VModule => {
            joined(items(value).map(|item| format!("{}={}", word(&item["filePattern"]), word(&item["verbosity"]))))
        }
    }
}

fn word(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn pairs(value: &Value, separator: &str) -> String {
    let members = value.as_object().into_iter().flatten();
    joined(members.map(|(name, value)| format!("{name}{separator}{}", word(value))))
}

fn csv(item: &str) -> String {
    if item.contains([',', '"', '\n']) { format!("\"{}\"", item.replace('"', "\"\"")) } else { item.to_owned() }
}

fn joined(items: impl IntoIterator<Item = String>) -> String {
    items.into_iter().collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use rubelet_core::config::Draft;

    use super::*;
    use crate::cli::arguments;

    /// The contents of upstream's flag set after the command line below.
    const UPSTREAM: &str = include_str!("../../testdata/flagz.txt");

    #[test]
    fn flags_are_shown_as_upstream_shows_them_but_for_secrets() {
        let line = r#"--config=/etc/k.yaml --node-labels=b=2,a=1 --cluster-dns=10.0.0.1,"a,b" -v4 --seccomp-default
            --eviction-hard=memory.available<1Gi,imagefs.available<5% --manifest-url-header=Authorization:canary,B:c
            --register-with-taints=a=b:NoSchedule,c:NoExecute --feature-gates=ComponentStatusz=false,ComponentFlagz=true
            --reserved-memory=1:memory=2Gi;0:memory=1Gi,hugepages-2Mi=4Mi --vmodule=b=2,a*=1 --sync-frequency=90s
            --system-reserved=memory=1Gi,cpu=100m --cpu-manager-policy-options=full-pcpus-only=true
            --log-json-info-buffer-size=1Ki --storage-driver-password=secret --housekeeping-interval=1h --node-ip=::1
            --containerd=/x.sock --allowed-unsafe-sysctls=a,b --address=010.0.0.1 --qos-reserved=memory=50%
            --pod-max-pids=0x10 --minimum-container-ttl-duration=1500ms"#;
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let given = arguments::parse(&words).unwrap();
        let own: Flags = serde_json::from_value(given.own.into()).unwrap();
        let config = Draft::without_file().flags(&given.fields).unwrap().config;
        let mut ours = shown(&own, &config, &given.idle);
        ours.retain(|name, _| !name.starts_with("rubelet-"));
        let theirs: BTreeMap<&str, String> = UPSTREAM
            .lines()
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| match name {
                "manifest-url-header" | "storage-driver-password" => (name, SECRET.to_owned()),
                _ => (name, value.to_owned()),
            })
            .collect();
        assert_eq!(ours, theirs);
    }
}
