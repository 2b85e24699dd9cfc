//! Pages about the agent and its node: which of them are enabled, and the response of disabled ones.
//!
//! Owns: feature gates and `enable…` fields as routes. Never: the contents of a page.
//! Upstream: `InstallSystemLogHandler`, `InstallProfilingHandler`, `InstallDebugFlagsHandler`, `InstallZPages`.

use std::{collections::BTreeMap, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{Method, StatusCode},
    response::Response,
    routing::any,
};
use rubelet_core::config::gates::Gate;
use tokio::time::timeout;

use super::{
    Secured, checkpoint,
    system_logs::{self, SystemLogs},
    zpages,
};
use crate::{
    cli::Options,
    logging,
    server::{health::text, read_only::only},
};

/// Where a node's logs are.
const LOG_DIR: &str = "/var/log";
/// A level is a few digits; a slower client times out.
const LEVEL_MAX_BYTES: usize = 64;
const LEVEL_TIMEOUT: Duration = Duration::from_secs(10);

/// The configuration of these pages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pages {
    /// Every flag with its value; `None` disables `/flagz`.
    pub flags: Option<BTreeMap<&'static str, String>>,
    pub has_statusz: bool,
    /// `ContainerCheckpoint`.
    pub has_checkpoint: bool,
    /// `enableDebugFlagsHandler`.
    pub has_debug_flags: bool,
    pub system_logs: SystemLogs,
}

impl Pages {
    pub(crate) fn of(options: &Options) -> Self {
        let (config, has) = (&options.config, |gate| options.gates.enabled(gate));
        Pages {
            flags: has(Gate::ComponentFlagz).then(|| options.shown_flags.clone()),
            has_statusz: has(Gate::ComponentStatusz),
            has_checkpoint: has(Gate::ContainerCheckpoint),
            has_debug_flags: config.enable_debug_flags_handler,
            system_logs: match (config.enable_system_log_handler, config.enable_system_log_query) {
                (false, _) => SystemLogs::Off,
                (true, true) if has(Gate::NodeLogQuery) => SystemLogs::FilesAndQueries { dir: LOG_DIR.into() },
                (true, _) => SystemLogs::Files { dir: LOG_DIR.into() },
            },
        }
    }

    /// The first path segments that upstream serves without a go-restful web service; its `/statusz` lists them.
    pub(crate) fn listed(&self) -> Vec<&'static str> {
        let mut listed = vec!["/configz", "/debug", "/healthz", "/metrics"];
        listed.extend(self.flags.is_some().then_some("/flagz"));
        listed.extend((self.system_logs == SystemLogs::Off).then_some("/logs"));
        listed.sort_unstable();
        listed
    }
}

pub(super) fn routes(pages: &Pages) -> Router<Secured> {
    let mut routes = Router::new()
        // There are no Go profiles; this is upstream's response when profiling is disabled.
        .route("/debug/pprof/", any(|| disabled("profiling")))
        .route("/debug/pprof/{*profile}", any(|| disabled("profiling")))
        .merge(system_logs::routes(&pages.system_logs));
    if pages.flags.is_some() {
        routes = routes.route("/flagz", any(zpages::flagz));
    }
    if pages.has_statusz {
        routes = routes.route("/statusz", any(zpages::statusz));
    }
    if pages.has_checkpoint {
        routes =
            routes.route("/checkpoint/{namespace}/{pod}/{container}", only([Method::POST], checkpoint::checkpoint));
    }
    let debug_flags = if pages.has_debug_flags { any(set_verbosity) } else { any(|| disabled("flags")) };
    routes.route("/debug/flags/v", debug_flags)
}

pub(super) async fn disabled(what: &str) -> Response {
    text(StatusCode::METHOD_NOT_ALLOWED, format!("{what} endpoint is disabled.\n"))
}

/// `PUT /debug/flags/v` with a number: sets the log verbosity.
async fn set_verbosity(method: Method, body: Body) -> Response {
    if method != Method::PUT {
        return text(StatusCode::NOT_ACCEPTABLE, "unsupported http method\n".to_owned());
    }
    let refused = |why: String| text(StatusCode::BAD_REQUEST, why + "\n");
    let read = match timeout(LEVEL_TIMEOUT, axum::body::to_bytes(body, LEVEL_MAX_BYTES)).await {
        Ok(Ok(read)) => String::from_utf8_lossy(&read).into_owned(),
        Ok(Err(error)) => return refused(format!("error reading request body: {error}")),
        Err(_) => return refused("error reading request body: i/o timeout".to_owned()),
    };
    if read.is_empty() || !read.bytes().all(|byte| byte.is_ascii_digit()) {
        return refused(format!("strconv.ParseUint: parsing {read:?}: invalid syntax"));
    }
    let Some(verbosity) = read.parse().ok().filter(|level| *level <= i32::MAX as u32) else {
        return refused(format!("strconv.ParseUint: parsing {read:?}: value out of range"));
    };
    logging::set_verbosity(verbosity);
    text(StatusCode::OK, format!("successfully set klog.logging.verbosity to {read}\n"))
}
