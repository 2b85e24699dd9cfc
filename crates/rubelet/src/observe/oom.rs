//! Kills by the kernel because the whole node ran out of memory.
//!
//! Owns: finding them in the kernel's log, and the event about each. A kill in one cgroup is the container's own end, which the
//! runtime reports. Never: acts on one.
//! Upstream: `oom/oom_watcher_linux.go`, cAdvisor's `oomparser`.

use std::time::Duration;

use rubelet_core::{
    effect::{EventRecord, InvolvedObject, Severity},
    event_reasons,
};
use rubelet_host::kernel_log::KernelLog;

use crate::world::World;

/// Before the log is opened again after an error.
const PAUSE: Duration = Duration::from_secs(60);

/// Records an event for each, as long as the agent runs.
pub async fn watch(world: World) {
    loop {
        let error = match KernelLog::open() {
            Ok(mut log) => follow(&world, &mut log).await,
            Err(error) => error,
        };
        tracing::warn!(%error, "the kernel's log cannot be read: kills for want of memory are not reported");
        tokio::time::sleep(PAUSE).await;
    }
}

async fn follow(world: &World, log: &mut KernelLog) -> std::io::Error {
    let mut parser = Parser::default();
    loop {
        let message = match log.next().await {
            Ok(message) => message,
            Err(error) => return error,
        };
        if let Some(Victim { name, pid }) = parser.read(&message) {
            let message = format!("System OOM encountered, victim process: {name}, pid: {pid}");
            let record = EventRecord::new(InvolvedObject::Node, Severity::Warning, event_reasons::SYSTEM_OOM, message);
            world.events.record(record, world.clock.now().wall);
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Victim {
    name: String,
    pid: u32,
}

/// The state between the messages of one kill.
#[derive(Debug, Default)]
enum Parser {
    #[default]
    Idle,
    /// The killer was invoked.
    Invoked,
}

impl Parser {
    /// The victim, if this message ends the report of a kill that is not one cgroup's.
    fn read(&mut self, message: &str) -> Option<Victim> {
        match self {
            Parser::Idle => {
                if message.contains("invoked oom-killer:") {
                    *self = Parser::Invoked;
                }
                None
            }
            Parser::Invoked => {
                let is_of_cgroup = message.contains("oom-kill:constraint=") && message.contains(",oom_memcg=")
                    || message.contains("killed as a result of limit of");
                let victim = victim(message);
                if is_of_cgroup || victim.is_some() {
                    *self = Parser::Idle;
                }
                victim.filter(|_| !is_of_cgroup)
            }
        }
    }
}

/// `Out of memory: Killed process 4711 (stress) total-vm:…`, or `Kill process` of older kernels.
fn victim(message: &str) -> Option<Victim> {
    let (_, rest) = message.split_once("Killed process ").or_else(|| message.split_once("Kill process "))?;
    let (pid, rest) = rest.split_once(' ')?;
    let name = rest.strip_prefix('(')?.split(')').next()?;
    Some(Victim { name: name.to_owned(), pid: pid.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn victims(log: &str) -> Vec<String> {
        let mut parser = Parser::default();
        let found = log.lines().filter_map(|line| parser.read(line.trim()));
        found.map(|Victim { name, pid }| format!("{name} {pid}")).collect()
    }

    #[test]
    fn only_kills_of_the_whole_node_are_found() {
        let node = "stress invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0
            CPU: 1 PID: 4711 Comm: stress Not tainted 6.1.0
            oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/,task=stress,pid=4711,uid=0
            Out of memory: Killed process 4711 (stress) total-vm:123kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0";
        assert_eq!(victims(node), ["stress 4711"]);
        let cgroup = "sh invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=1000
            oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/kubepods/podu1,task_memcg=/kubepods/podu1/c1,task=tail,pid=12,uid=0
            Memory cgroup out of memory: Killed process 12 (tail) total-vm:123kB";
        assert!(victims(cgroup).is_empty());
        let old = "x invoked oom-killer: gfp_mask=0x0
            Task in /a killed as a result of limit of /a
            Killed process 9 (x) total-vm:1kB
            y invoked oom-killer: gfp_mask=0x0
            Killed process 10 (y (z)) total-vm:1kB";
        assert_eq!(victims(old), ["y (z 10"]);
        assert!(victims("Killed process 1 (a) without a killer\nnoise").is_empty());
    }
}
