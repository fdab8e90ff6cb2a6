//! The files that the engine writes, opened by the broker at the start, and again after they were
//! moved away.
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use slipgate_policy::document::ConfigError;

/// Opens the flow log. It is readable too: an adopting engine looks for its predecessor's last
/// record.
pub(crate) fn open_flow_log(path: &Path) -> Result<File, ConfigError> {
    open_to_append("--flow-log", path)
}

/// Opens the pcap file for appending: a pcapng file may have several sections.
pub(crate) fn open_pcap(path: &Path) -> Result<File, ConfigError> {
    open_to_append("--pcap", path)
}

fn open_to_append(flag: &'static str, path: &Path) -> Result<File, ConfigError> {
    let refused =
        |problem: String, remedy: &str| ConfigError::new(flag, path.display(), problem, remedy);
    let unusable = |e: io::Error| {
        let remedy = "give a file in a directory that is there";
        refused(format!("can't append to it ({e})"), remedy)
    };
    let file = OpenOptions::new()
        .read(true)
        .append(true)
        .create(true)
        .mode(0o640)
        // A FIFO without a reader is not waited for.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(unusable)?;
    // Writing to anything else may block, and every VM waits with it.
    if !file.metadata().map_err(unusable)?.is_file() {
        let remedy = "give one, and read it with `tail -F`";
        return Err(refused("it is no regular file".into(), remedy));
    }
    Ok(file)
}
