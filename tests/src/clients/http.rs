//! An HTTP client for one GET.

use std::{
    io::{Read, Write},
    net::SocketAddr,
    time::Duration,
};

use super::tcp;
use crate::error::{Error, Result, Tried};

/// Requests `path` by GET. Returns the status code and the body.
///
/// # Errors
/// The connection fails, or the answer is not HTTP.
pub fn get(address: SocketAddr, path: &str, timeout: Duration) -> Result<(u16, Vec<u8>)> {
    let what = || format!("GET http://{address}{path}");
    let mut stream = tcp::connect(address, timeout)?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )
    .tried(what())?;
    let mut all = Vec::new();
    stream.read_to_end(&mut all).tried(what())?;
    let end = all.windows(4).position(|four| four == b"\r\n\r\n");
    let head = end.and_then(|end| std::str::from_utf8(&all[..end]).ok());
    let status = head.and_then(|head| head.split(' ').nth(1)?.parse().ok());
    match (status, end) {
        (Some(status), Some(end)) => Ok((status, all.split_off(end + 4))),
        _ => Err(Error::unexpected(format!(
            "{}: the answer is no HTTP",
            what()
        ))),
    }
}
