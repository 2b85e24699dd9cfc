//! The command line: commands, arguments and settings.
//!
//! Owns: the commands and their arguments. Never: runs them; `main.rs` does.
//! Upstream: `cmd/kubelet/app/server.go` (NewKubeletCommand).

pub mod acted_on;
mod arguments;
mod client;
pub mod events;
pub mod explain;
pub mod flags;
mod flagz;
mod help;
mod load;
pub mod logs;
pub mod node;
mod options;
pub mod pods;
mod print;
mod values;

use std::fmt;

use rubelet_core::config::Host;
use serde_json::Value;

pub use self::{
    load::Sources,
    options::{Flags, Options, host_name, report, this_host},
};

/// The Kubernetes version whose behaviour this is, in the format `kubeadm` and others parse.
pub const KUBERNETES_VERSION: &str = concat!("v1.36.3+rubelet.", env!("CARGO_PKG_VERSION"));

#[derive(Debug)]
pub enum Command {
    Run(Box<Options>),
    ConfigCheck(Sources),
    /// These five parse their own arguments.
    Pods(Vec<String>),
    Node(Vec<String>),
    Explain(Vec<String>),
    Logs(Vec<String>),
    Events(Vec<String>),
    /// Printed, then the program exits.
    Version(String),
    Help(String),
}

/// Why the program does nothing: all problems, each with its subject and the allowed values.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    pub during: &'static str,
    pub problems: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problems.as_slice() {
            [only] => write!(f, "{}: {only}", self.during),
            problems => {
                write!(f, "{}, {} problems:", self.during, problems.len())?;
                problems.iter().try_for_each(|problem| write!(f, "\n  {}", problem.replace('\n', "\n  ")))
            }
        }
    }
}

impl std::error::Error for Failure {}

impl Command {
    /// `words` without the program's name. Reads the named configuration files and changes nothing.
    pub fn parse(words: &[String], host: Host) -> Result<Command, Failure> {
        if let Some((first, rest)) = words.split_first() {
            match first.as_str() {
                "pods" => return Ok(Command::Pods(rest.to_vec())),
                "node" => return Ok(Command::Node(rest.to_vec())),
                "explain" => return Ok(Command::Explain(rest.to_vec())),
                "logs" => return Ok(Command::Logs(rest.to_vec())),
                "events" => return Ok(Command::Events(rest.to_vec())),
                "config" => return config_check(rest),
                _ => {}
            }
        }
        let arguments = arguments::parse(words).map_err(flag_failure)?;
        if let Some(word) = arguments.positional.first() {
            return Err(Failure { during: "command line", problems: vec![format!("unknown command {word}")] });
        }
        if arguments.help {
            return Ok(Command::Help(help::text()));
        }
        match &arguments.version {
            None => {}
            Some(Value::String(raw)) if raw == "raw" => return Ok(Command::Version(raw_version())),
            // `--version=v1.2.3` makes upstream claim another version; we print what we are.
            Some(_) => return Ok(Command::Version(format!("Kubernetes {KUBERNETES_VERSION}\n"))),
        }
        let options = Options::load(arguments, host)
            .map_err(|problems| Failure { during: "failed to load the configuration", problems })?;
        Ok(Command::Run(Box::new(options)))
    }
}

fn config_check(words: &[String]) -> Result<Command, Failure> {
    let usage =
        || Failure { during: "usage", problems: vec!["rubelet config check FILE [--config-dir DIR]".to_owned()] };
    let (check, rest) = words.split_first().ok_or_else(usage)?;
    let arguments = arguments::parse(rest).map_err(flag_failure)?;
    let only_dir = arguments.fields.is_empty() && arguments.own.keys().all(|name| name == "config-dir");
    let [file] = arguments.positional.as_slice() else { return Err(usage()) };
    if check != "check" || !only_dir {
        return Err(usage());
    }
    let drop_in_dir = arguments.own.get("config-dir").and_then(Value::as_str).map(Into::into);
    Ok(Command::ConfigCheck(Sources { file: Some(file.into()), drop_in_dir, is_standalone: false }))
}

fn flag_failure(problems: Vec<String>) -> Failure {
    Failure { during: "failed to parse kubelet flag", problems }
}

fn raw_version() -> String {
    let (arch, os) = (std::env::consts::ARCH, std::env::consts::OS);
    format!(
        "version.Info{{Major:\"1\", Minor:\"36\", GitVersion:{KUBERNETES_VERSION:?}, Compiler:\"rustc\", Platform:\"{os}/{arch}\"}}\n"
    )
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, time::Duration};

    use rubelet_core::config::KubeletConfiguration;

    use super::*;

    const TYPE: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

    /// A directory of files, gone at the end of the test.
    struct Files(tempfile::TempDir);

    impl Files {
        fn new(files: &[(&str, &str)]) -> Files {
            let dir = tempfile::tempdir().unwrap();
            for (name, text) in files {
                let path = dir.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text.replace("TYPE\n", TYPE)).unwrap();
            }
            Files(dir)
        }

        fn path(&self) -> &Path {
            self.0.path()
        }

        /// `DIR` in the line stands for the directory.
        fn parse(&self, line: &str) -> Result<Command, Failure> {
            let words: Vec<String> =
                line.split_whitespace().map(|word| word.replace("DIR", self.path().to_str().unwrap())).collect();
            Command::parse(&words, Host::CgroupV2)
        }

        fn options(&self, line: &str) -> Options {
            match self.parse(line) {
                Ok(Command::Run(options)) => *options,
                other => panic!("{other:?}"),
            }
        }

        fn hidden(&self, text: &str) -> String {
            text.replace(self.path().to_str().unwrap(), "DIR")
        }

        fn failure(&self, line: &str) -> String {
            self.hidden(&self.parse(line).unwrap_err().to_string())
        }
    }

    fn no_files() -> Files {
        Files::new(&[])
    }

    #[test]
    fn flags_alone_use_flag_defaults_and_warn_of_deprecation() {
        let options = no_files().options("--pod-manifest-path=/m --fail_swap_on=false --node-labels=a=b --max-pods=5");
        assert_eq!((options.config.static_pod_path.as_str(), options.config.read_only_port), ("/m", 0));
        assert!(!options.config.fail_swap_on);
        let told: Vec<&str> = options.warnings.iter().map(|line| line.split(", This").next().unwrap()).collect();
        insta::assert_snapshot!(told.join("\n"), @"
        Flag --pod-manifest-path has been deprecated
        Flag --fail-swap-on has been deprecated
        Flag --max-pods has been deprecated
        ");
    }

    /// Address, anonymous, mode, read-only port, and whether the start warns of an open port.
    fn openness(options: &Options) -> String {
        let KubeletConfiguration { address, authentication, authorization, read_only_port, .. } = &options.config;
        let warned = options.warnings.iter().filter(|line| line.contains("without authentication")).count();
        let (anonymous, mode) = (authentication.anonymous.enabled, &authorization.mode);
        format!("{address} {anonymous} {mode} {read_only_port} {warned}")
    }

    #[test]
    fn standalone_node_requires_authentication_by_default() {
        let open = "TYPE\nauthentication: {anonymous: {enabled: true}, webhook: {enabled: false}}\nauthorization: {mode: AlwaysAllow}\n";
        let files = Files::new(&[
            ("empty.yaml", "TYPE\n"),
            ("open.yaml", open),
            ("d/a.conf", "TYPE\naddress: 10.0.0.1\n"),
            ("open/a.conf", open),
        ]);
        let table = [
            ("", "127.0.0.1 false AlwaysAllow 0 0"),
            ("--address=0.0.0.0", "0.0.0.0 false AlwaysAllow 0 0"),
            ("--anonymous-auth", "127.0.0.1 true AlwaysAllow 0 0"),
            ("--anonymous-auth --address=::1", "::1 true AlwaysAllow 0 0"),
            ("--anonymous-auth --address=0.0.0.0", "0.0.0.0 true AlwaysAllow 0 1"),
            ("--anonymous-auth --address=::", ":: true AlwaysAllow 0 1"),
            ("--anonymous-auth --address=0.0.0.0 --authorization-mode=Webhook", "0.0.0.0 true Webhook 0 0"),
            ("--read-only-port=10255", "127.0.0.1 false AlwaysAllow 10255 0"),
            ("--config-dir=DIR/d", "10.0.0.1 false AlwaysAllow 0 0"),
            ("--config-dir=DIR/open", "127.0.0.1 true AlwaysAllow 0 0"),
            ("--config=DIR/empty.yaml", "0.0.0.0 false Webhook 0 0"),
            ("--config=DIR/open.yaml", "0.0.0.0 true AlwaysAllow 0 1"),
            ("--config=DIR/open.yaml --address=127.0.0.1", "127.0.0.1 true AlwaysAllow 0 0"),
            ("--kubeconfig=/k", "0.0.0.0 true AlwaysAllow 10255 1"),
            ("--kubeconfig=/k --anonymous-auth=false", "0.0.0.0 false AlwaysAllow 10255 0"),
            ("--kubeconfig=/k --config=DIR/empty.yaml", "0.0.0.0 false Webhook 0 0"),
        ];
        for (line, expected) in table {
            let options = files.options(&format!("--pod-manifest-path=/m {line}"));
            assert_eq!(openness(&options), expected, "{line}");
        }
    }

    #[tokio::test]
    async fn a_node_without_a_source_of_pods_refuses_to_start() {
        let files = no_files();
        let options = files.options("--root-dir=DIR/root");
        let start = tokio::time::timeout(Duration::from_secs(5), crate::run::run(&options));
        let refusal = start.await.expect("it does not run").unwrap_err().to_string();
        assert_eq!(refusal, "no source of pods: set --kubeconfig, staticPodPath or staticPodURL");
        assert!(!files.path().join("root").exists());
        for line in ["--pod-manifest-path=/m", "--manifest-url=http://m/", "--kubeconfig=/k"] {
            assert_eq!(files.options(line).sources().len(), 1, "{line}");
        }
    }

    #[test]
    fn drop_ins_ending_in_conf_apply_in_name_order() {
        let files = Files::new(&[
            ("main.yaml", "TYPE\nmaxPods: 1\nstaticPodPath: manifests\nhealthzPort: 0\n"),
            ("d/20.conf", "TYPE\nmaxPods: 20\n"),
            ("d/10/a.conf", "TYPE\nmaxPods: 10\npodsPerCore: 10\n"),
            ("d/30.yaml", "TYPE\nmaxPods: 30\n"),
        ]);
        let options = files.options("--config=DIR/main.yaml --config-dir DIR/d --port 4000");
        let config = &options.config;
        assert_eq!((config.max_pods, config.pods_per_core, config.port, config.healthz_port), (20, 10, 4000, 0));
        assert_eq!(config.static_pod_path, files.path().join("manifests").to_str().unwrap());
        let skipped = options.warnings.iter().find(|line| line.contains("Skipped")).unwrap();
        assert_eq!(
            files.hidden(skipped),
            "Skipped file in drop-in directory (does not have .conf extension): DIR/d/30.yaml"
        );
    }

    #[test]
    fn yaml_is_that_of_go_and_json_is_read_too() {
        let files = Files::new(&[
            ("a", "TYPE\nfailSwapOn: no\nmaxPods: 0144\nport: 1\nport: 2\n"),
            (
                "b",
                "{\n\t\"apiVersion\": \"kubelet.config.k8s.io/v1beta1\",\n\t\"kind\": \"KubeletConfiguration\", \"maxPods\": 7}",
            ),
        ]);
        let options = files.options("--config=DIR/a");
        assert_eq!((options.config.fail_swap_on, options.config.max_pods, options.config.port), (false, 100, 2));
        insta::assert_snapshot!(files.hidden(&options.warnings[0]), @"DIR/a: Using lenient decoding as strict decoding failed: not YAML: duplicate mapping key: port at line 6, column 1");
        assert_eq!(files.options("--config=DIR/b").config.max_pods, 7);
    }

    #[test]
    fn all_config_problems_are_reported_with_file_field_and_value() {
        let files = Files::new(&[
            ("main.yaml", "TYPE\nhairpinMode: loop\ncpuManagerPolicy: dynamic\n"),
            ("d/a.conf", "TYPE\nregistryBurst: -1\n"),
            ("types.yaml", "TYPE\nport: ten\nsyncFrequency: 60\n"),
            ("bad/a.conf", "maxPods: 1"),
            ("bad/b.conf", "TYPE\na: 1\na: 2\n"),
            ("bad2/a.conf", "maxPods: 1"),
            ("empty", ""),
        ]);
        let lines = [
            "--config=DIR/main.yaml --config-dir=DIR/d --oom-score-adj=5000 --node-labels=kubernetes.io/x=y",
            "--config=DIR/types.yaml",
            "--config-dir=DIR/bad",
            "--config-dir=DIR/bad2",
            "--config=DIR/empty",
            "--config=DIR/missing",
            "--config-dir=DIR/missing",
            "--feature-gates=Nope=true",
            "run --port=1",
            "--port=x --nope",
            "config",
            "config check",
            "config check a b",
            "config check a --port=1",
        ];
        insta::assert_snapshot!(lines.map(|line| files.failure(line)).join("\n"), @r#"
        failed to load the configuration, 5 problems:
          unknown 'kubernetes.io' or 'k8s.io' labels specified with --node-labels: [kubernetes.io/x]
          --node-labels in the 'kubernetes.io' namespace must begin with an allowed prefix (kubelet.kubernetes.io, node.kubernetes.io) or be in the specifically allowed set (beta.kubernetes.io/arch, beta.kubernetes.io/instance-type, beta.kubernetes.io/os, failure-domain.beta.kubernetes.io/region, failure-domain.beta.kubernetes.io/zone, kubernetes.io/arch, kubernetes.io/hostname, kubernetes.io/os, node.kubernetes.io/instance-type, topology.kubernetes.io/region, topology.kubernetes.io/zone)
          DIR/d/a.conf: registryBurst = -1: invalid configuration: registryBurst (--registry-burst) -1 must not be a negative number
          flag --oom-score-adj: oomScoreAdj = 5000: invalid configuration: oomScoreAdj (--oom-score-adj) 5000 must be between -1000 and 1000, inclusive
          DIR/main.yaml: hairpinMode = "loop": invalid configuration: option "loop" specified for hairpinMode (--hairpin-mode). Valid options are "none", "hairpin-veth" or "promiscuous-bridge"
          DIR/main.yaml: cpuManagerPolicy = "dynamic": invalid configuration: cpuManagerPolicy "dynamic" must be one of ["none", "static"]
        failed to load the configuration, 2 problems:
          DIR/types.yaml: port = "ten": invalid type: string "ten", expected i32
          DIR/types.yaml: syncFrequency = 60: invalid type: integer `60`, expected a string
        failed to load the configuration, 2 problems:
          DIR/bad/b.conf: not YAML: duplicate mapping key: a at line 4, column 1
          DIR/bad/a.conf: kind: is missing, must be KubeletConfiguration
        failed to load the configuration: DIR/bad2/a.conf: kind: is missing, must be KubeletConfiguration
        failed to load the configuration: DIR/empty: kubelet config file was empty
        failed to load the configuration: DIR/missing: No such file or directory (os error 2)
        failed to load the configuration: failed to walk through kubelet dropin directory "DIR/missing": DIR/missing: No such file or directory (os error 2)
        failed to load the configuration: flag --feature-gates: featureGates.Nope = true: unrecognized feature gate: Nope
        command line: unknown command run
        failed to parse kubelet flag, 2 problems:
          invalid argument "x" for "--port" flag: strconv.ParseInt: parsing "x": invalid syntax
          unknown flag: --nope
        usage: rubelet config check FILE [--config-dir DIR]
        usage: rubelet config check FILE [--config-dir DIR]
        usage: rubelet config check FILE [--config-dir DIR]
        usage: rubelet config check FILE [--config-dir DIR]
        "#);
    }

    #[test]
    fn commands_are_distinguished() {
        let told = |line: &str| match no_files().parse(line).unwrap() {
            Command::Run(_) => "run".to_owned(),
            Command::ConfigCheck(sources) => format!("check {sources:?}"),
            Command::Pods(words) => format!("pods {words:?}"),
            Command::Node(words) => format!("node {words:?}"),
            Command::Explain(words) => format!("explain {words:?}"),
            Command::Logs(words) => format!("logs {words:?}"),
            Command::Events(words) => format!("events {words:?}"),
            Command::Version(text) => text.trim().to_owned(),
            Command::Help(text) => text.lines().next().unwrap().to_owned(),
        };
        let lines = [
            "",
            "pods",
            "node -o json",
            "explain web",
            "logs web -c a -f",
            "events",
            "config check f --config-dir=d",
            "-h",
            "--help --port=1",
            "--version",
        ];
        insta::assert_snapshot!(lines.map(told).join("\n"), @r#"
        run
        pods []
        node ["-o", "json"]
        explain ["web"]
        logs ["web", "-c", "a", "-f"]
        events []
        check Sources { file: Some("f"), drop_in_dir: Some("d"), is_standalone: false }
        Rubelet runs the pods of one Kubernetes node.
        Rubelet runs the pods of one Kubernetes node.
        Kubernetes v1.36.3+rubelet.0.1.0
        "#);
        assert!(told("--version=raw").starts_with("version.Info{Major:\"1\", Minor:\"36\""));
    }

    #[test]
    fn config_check_lists_fields_without_effect() {
        let files =
            Files::new(&[("c", "TYPE\nmaxPods: 5\nsyncFrequency: 5s\nport: 10250\npodCIDR: 10.1.0.0/16\nprot: 1\n")]);
        let Command::ConfigCheck(sources) = files.parse("config check DIR/c").unwrap() else { panic!("it is a check") };
        insta::assert_snapshot!(files.hidden(&report(&sources, Host::CgroupV2).unwrap()), @r#"
        DIR/c: unknown field "prot" is ignored
        DIR/c: all values are valid
        accepted but without effect:
          podCIDR
        "#);
    }

    #[test]
    fn core_settings_follow_options() {
        let files = Files::new(&[(
            "c",
            "TYPE\nstaticPodPath: /m\nmaxParallelImagePulls: 3\ncpuCFSQuota: false\nresolvConf: ''\nseccompDefault: true\n",
        )]);
        let settings = files
            .options("--config=DIR/c --maximum-dead-containers=7 --root-dir=/r --manifest-url=http://x")
            .settings("node", vec!["10.0.0.1".to_owned()]);
        assert_eq!(settings.sources, [rubelet_core::event::Source::File, rubelet_core::event::Source::Http]);
        assert_eq!((settings.max_parallel_pulls, settings.max_dead_containers), (Some(3), 7));
        assert_eq!((settings.root_dir.to_str(), settings.pod_logs_dir.to_str()), (Some("/r"), Some("/var/log/pods")));
        assert_eq!((settings.node.cpu_cfs_quota_period, settings.node.resolv_conf), (None, None));
        assert_eq!(settings.node.default_seccomp, rubelet_core::settings::DefaultSeccomp::RuntimeDefault);
        let serial = no_files().options("").settings("node", Vec::new());
        assert_eq!((serial.max_parallel_pulls, serial.sources.len()), (Some(1), 0));
        // The defaults of simulator and tests equal those of an empty command line.
        let mut default = rubelet_core::settings::Settings {
            sources: Vec::new(),
            ..rubelet_core::settings::Settings::for_node("node")
        };
        // Requested here; set once the node is known to support it.
        default.node.oom_kills_whole_container = true;
        assert_eq!(serial, default);
    }

    #[test]
    fn node_name_is_host_name_unless_overridden() {
        let options = no_files().options("");
        assert_eq!(options.node_name(" Node-A.Example\n"), Ok("node-a.example".to_owned()));
        assert_eq!(options.node_name("\n"), Err("empty hostname is invalid".to_owned()));
        assert_eq!(no_files().options("--hostname-override=Other").node_name("host"), Ok("other".to_owned()));
    }
}
