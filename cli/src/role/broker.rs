mod reserve;
mod spawn;
pub(crate) fn run(_c: crate::config::Config, _l: &str) -> anyhow::Result<()> {
    Ok(())
}
