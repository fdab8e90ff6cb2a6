//! The part of HTTP/1.1 (RFC 9112) that a scraper needs: one request without a body, one answer,
//! and the connection is closed.

/// Longest request, bytes, up to the empty line that ends it.
pub(super) const MAX_REQUEST: usize = 4_096;

/// Resource that a request asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// The page; `head`: without its text.
    Metrics { head: bool },
    /// The request is refused with this status, for this reason.
    Refused(u16, &'static str),
}

/// Reads a request; `None` while its end has not come.
pub(super) fn read(request: &[u8]) -> Option<Wanted> {
    let ends = |end: &[u8]| request.windows(end.len()).any(|window| window == end);
    if !ends(b"\r\n\r\n") && !ends(b"\n\n") {
        let too_long = request.len() >= MAX_REQUEST;
        return too_long.then_some(Wanted::Refused(431, "the request is too long"));
    }
    Some(understand(request))
}

fn understand(request: &[u8]) -> Wanted {
    const BAD: Wanted = Wanted::Refused(400, "this is no HTTP/1.1 request");
    let line = request.split(|b| *b == b'\n').next().unwrap_or_default();
    let Ok(line) = str::from_utf8(line) else {
        return BAD;
    };
    let mut words = line.trim_end_matches('\r').split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return BAD;
    };
    if !version.starts_with("HTTP/1.") {
        return BAD;
    }
    let head = match method {
        "GET" => false,
        "HEAD" => true,
        _ => return Wanted::Refused(405, "GET or HEAD, no other method"),
    };
    match target.split('?').next() {
        Some("/metrics") => Wanted::Metrics { head },
        _ => Wanted::Refused(404, "only /metrics is here"),
    }
}

/// An answer of this status and type, whole.
pub(super) fn answer(status: u16, kind: &str, text: &str, head: bool) -> Vec<u8> {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        431 => "Request Header Fields Too Large",
        _ => "Service Unavailable",
    };
    let allow = if status == 405 {
        "Allow: GET, HEAD\r\n"
    } else {
        ""
    };
    let length = text.len();
    let text = if head { "" } else { text };
    format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         {allow}Connection: close\r\n\r\n{text}"
    )
    .into_bytes()
}

#[cfg(test)]
#[path = "http_test.rs"]
mod tests;
