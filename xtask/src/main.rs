//! The project's own commands.

mod gen_protos;

fn main() -> anyhow::Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("gen") => gen_protos::run(),
        _ => anyhow::bail!("cargo xtask gen"),
    }
}
