//! Rules about logs, traces and hidden metrics.
//!
//! Upstream: `component-base/logs/api/v1`, `component-base/tracing/api/v1`, `component-base/metrics/api/v1`.

use super::Rules;
use crate::config::{duration::GoDuration, gates::Gate};

const MAX_VERBOSITY: u32 = i32::MAX as u32;

impl Rules<'_> {
    pub(super) fn logging(&mut self) {
        let logging = &self.config.logging;
        if logging.flush_frequency.duration <= GoDuration::default() {
            let shown = serde_json::to_value(logging.flush_frequency).unwrap_or_default();
            self.field_invalid("logging.flushFrequency", &shown, "Must be greater than zero");
        }
        match logging.format.as_str() {
            "text" => {}
            "json" if self.gates.enabled(Gate::LoggingBetaOptions) => {}
            "json" => {
                self.field_forbidden("logging.format", "Log format json is disabled, see LoggingBetaOptions feature");
            }
            other => self.field_invalid("logging.format", &format!("{other:?}"), "Unsupported log format"),
        }
        let too_much = format!("Must be <= {MAX_VERBOSITY}");
        if logging.verbosity > MAX_VERBOSITY {
            self.field_invalid("logging.verbosity", &logging.verbosity, &too_much);
        }
        if !logging.vmodule.is_empty() && !["", "text"].contains(&logging.format.as_str()) {
            self.field_forbidden("logging.vmodule", "Only supported for text log format");
        }
        for (index, item) in logging.vmodule.iter().enumerate() {
            let field = format!("logging.vmodule[{index}]");
            if item.file_pattern.is_empty() {
                self.refuse(&field, format!("{field}: Required value: File pattern must not be empty"));
            }
            if item.file_pattern.contains(['=', ',']) {
                let pattern = format!("{:?}", item.file_pattern);
                self.field_invalid(&field, &pattern, "File pattern must not contain equal sign or comma");
            }
            if item.verbosity > MAX_VERBOSITY {
                self.field_invalid(&field, &item.verbosity, &too_much);
            }
        }
        for (name, routing) in [("text", &logging.options.text), ("json", &logging.options.json)] {
            if self.gates.enabled(Gate::LoggingAlphaOptions) {
                continue;
            }
            let disabled = "Feature LoggingAlphaOptions is disabled";
            if routing.split_stream {
                self.field_forbidden(&format!("logging.options.{name}.splitStream"), disabled);
            }
            if !routing.info_buffer_size.amount.is_zero() {
                self.field_forbidden(&format!("logging.options.{name}.infoBufferSize"), disabled);
            }
        }
    }

    pub(super) fn tracing(&mut self) {
        let hidden = self.config.show_hidden_metrics_for_version.as_str();
        if !["", "1.35"].contains(&hidden) {
            const FIELD: &str = "showHiddenMetricsForVersion";
            let allowed = "must be omitted or have the value '1.35'; only the previous minor version is allowed";
            self.refuse(FIELD, format!("invalid {FIELD}: {FIELD}: Invalid value: {hidden:?}: {allowed}"));
        }
        let Some(tracing) = &self.config.tracing else { return };
        match tracing.sampling_rate_per_million {
            Some(rate) if rate < 0 => {
                self.field_invalid("tracing.samplingRatePerMillion", &rate, "sampling rate must be positive");
            }
            Some(rate) if rate > 1_000_000 => {
                let allowed = "sampling rate per million must be less than or equal to one million";
                self.field_invalid("tracing.samplingRatePerMillion", &rate, allowed);
            }
            Some(_) | None => {}
        }
        let Some(endpoint) = &tracing.endpoint else { return };
        let scheme = if endpoint.contains("//") { endpoint.split(':').next().unwrap_or_default() } else { "dns" };
        let quoted = format!("{endpoint:?}");
        let is_scheme = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
        if !is_scheme(scheme) {
            let why = format!("parse {quoted}: first path segment in URL cannot contain colon");
            self.field_invalid("tracing.endpoint", &quoted, &why);
        } else if !["dns", "unix", "unix-abstract"].contains(&scheme) {
            let options = "Options are none, dns, unix, or unix-abstract.  See https://github.com/grpc/grpc/blob/master/doc/naming.md";
            self.field_invalid("tracing.endpoint", &quoted, &format!("unsupported scheme: {scheme}.  {options}"));
        }
    }

    fn field_invalid(&mut self, field: &str, value: &dyn std::fmt::Display, allowed: &str) {
        self.refuse(field, format!("{field}: Invalid value: {value}: {allowed}"));
    }

    fn field_forbidden(&mut self, field: &str, why: &str) {
        self.refuse(field, format!("{field}: Forbidden: {why}"));
    }
}
