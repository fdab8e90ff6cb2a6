mod kernel;
mod port_io;
pub(crate) fn run(_fd: i32) -> anyhow::Result<()> {
    Ok(())
}
