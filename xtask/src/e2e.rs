//! End-to-end tests: the runner.
use crate::testbed::{Programs, Runtime, Testbed};
use anyhow::bail;
#[derive(Debug, Default)]
pub struct Tally {
    pub passed: usize,
    pub failed: usize,
}
impl Tally {
    pub fn into_result(self) -> anyhow::Result<()> {
        println!("{} passed, {} failed", self.passed, self.failed);
        if self.failed > 0 {
            bail!("some tests failed")
        }
        Ok(())
    }
}
pub fn run(runtimes: &[Runtime], _filter: &str) -> anyhow::Result<Tally> {
    for runtime in runtimes {
        let programs = Programs::ensure(*runtime)?;
        let bed = Testbed::start(&programs)?;
        println!("{}", bed.ctr(["version"])?);
        println!("{}", bed.ctr(["images", "ls", "-q"])?);
    }
    Ok(Tally::default())
}
