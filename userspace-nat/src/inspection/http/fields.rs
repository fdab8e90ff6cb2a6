//! Fields of message heads and trailers (RFC 9110 section 5).
use httparse::{EMPTY_HEADER, Header};

use crate::inspection::http::Refused;

/// Value of a field that may occur once; `None` if it is absent. A name that differs only in
/// punctuation is refused, because gateways treat it as the same (RFC 3875 section 4.1.18).
///
/// # Errors
/// If the field occurs more than once, or under such a name.
pub(super) fn only<'f>(fields: &'f [Header<'_>], name: &str) -> Result<Option<&'f [u8]>, Refused> {
    let mut found = None;
    for field in fields {
        if !is_like(field.name, name) {
            continue;
        }
        if found.is_some() || !field.name.eq_ignore_ascii_case(name) {
            return Err(Refused::Malformed);
        }
        found = Some(field.value.trim_ascii());
    }
    Ok(found)
}

/// Whether a list, which may be split over several fields, has an element.
pub(super) fn lists(fields: &[Header<'_>], name: &str, element: &str) -> bool {
    let values = fields.iter().filter(|field| is_like(field.name, name));
    values
        .flat_map(|field| field.value.split(|octet| *octet == b','))
        .any(|value| value.trim_ascii().eq_ignore_ascii_case(element.as_bytes()))
}

/// Whether a line may follow the last chunk: a field that neither frames nor routes a message (RFC
/// 9110 section 6.5.1).
pub(super) fn is_trailer(line: &[u8]) -> bool {
    const NEVER: [&str; 8] = [
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "upgrade",
        "expect",
        "te",
        "trailer",
    ];
    let mut found = [EMPTY_HEADER; 1];
    let whole = [line, b"\r\n\r\n"].concat();
    match httparse::parse_headers(&whole, &mut found) {
        Ok(httparse::Status::Complete((len, [field]))) if len == whole.len() => {
            !NEVER.iter().any(|name| is_like(field.name, name))
        }
        _ => false,
    }
}

fn is_like(field: &str, name: &str) -> bool {
    let same = |(a, b): (u8, u8)| {
        a.eq_ignore_ascii_case(&b) || !a.is_ascii_alphanumeric() && !b.is_ascii_alphanumeric()
    };
    field.len() == name.len() && field.bytes().zip(name.bytes()).all(same)
}
