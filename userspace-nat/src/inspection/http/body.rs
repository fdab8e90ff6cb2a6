//! End of a request's body (RFC 9112 section 6).
use httparse::Header;

use crate::inspection::http::{
    Refused,
    fields::{is_trailer, only},
};

/// Remaining part of a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body {
    /// This many bytes are left.
    Length(u64),
    /// The line with a chunk's size follows.
    ChunkSize,
    /// In a chunk: this many bytes are left, then the line end after it.
    Chunk(u64),
    /// In the line end after a chunk: this many of its bytes were read.
    ChunkEnd(u8),
    /// After the last chunk: trailer fields, then an empty line.
    Trailer {
        /// Length of the fields so far, bytes.
        len: u16,
    },
}

/// Longest line with a chunk's size, bytes: 8 digits and the line end.
const MAX_SIZE_LINE: usize = 10;
/// Largest chunk, bytes: no server reads it as a negative number.
const MAX_CHUNK: u64 = i32::MAX as u64;
/// Longest trailer section, bytes.
const MAX_TRAILER: usize = 8_192;

impl Body {
    pub(super) fn of(fields: &[Header<'_>], minor: u8) -> Result<Self, Refused> {
        let length = content_length(fields)?;
        match (only(fields, "transfer-encoding")?, length) {
            (None, length) => Ok(Self::Length(length.unwrap_or(0))),
            (Some(coding), None) if minor == 1 && coding.eq_ignore_ascii_case(b"chunked") => {
                Ok(Self::ChunkSize)
            }
            _ => Err(Refused::Malformed),
        }
    }

    /// Content at the beginning of these bytes; `None` if they are framing, or the body's end.
    pub fn content<'s>(&self, stream: &'s [u8]) -> Option<&'s [u8]> {
        match *self {
            Self::Length(0) => None,
            Self::Length(left) | Self::Chunk(left) => Some(&stream[..clamp(stream, left)]),
            _ => None,
        }
    }

    /// Number of the given bytes that belong to the body; 0 if more bytes are needed; `None` if the
    /// body is over.
    ///
    /// # Errors
    /// If the framing is malformed.
    pub fn take(&mut self, stream: &[u8]) -> Result<Option<usize>, Refused> {
        match *self {
            Self::Length(0) => Ok(None),
            Self::Length(left) => {
                let n = clamp(stream, left);
                *self = Self::Length(left - n as u64);
                Ok(Some(n))
            }
            Self::Chunk(left) => {
                let n = clamp(stream, left);
                *self = match left - n as u64 {
                    0 => Self::ChunkEnd(0),
                    left => Self::Chunk(left),
                };
                Ok(Some(n))
            }
            Self::ChunkEnd(at) => {
                let Some(octet) = stream.first() else {
                    return Ok(Some(0));
                };
                if *octet != b"\r\n"[usize::from(at & 1)] {
                    return Err(Refused::Malformed);
                }
                *self = if at == 0 {
                    Self::ChunkEnd(1)
                } else {
                    Self::ChunkSize
                };
                Ok(Some(1))
            }
            Self::ChunkSize => {
                let Some(line) = line(stream, MAX_SIZE_LINE)? else {
                    return Ok(Some(0));
                };
                *self = match hexadecimal(line).ok_or(Refused::Malformed)? {
                    0 => Self::Trailer { len: 0 },
                    MAX_CHUNK.. => return Err(Refused::TooLong),
                    size => Self::Chunk(size),
                };
                Ok(Some(line.len() + 2))
            }
            Self::Trailer { len } => {
                let most = MAX_TRAILER.saturating_sub(len.into());
                let Some(line) = line(stream, most)? else {
                    return Ok(Some(0));
                };
                // Else a server that knows no trailers could find a request there.
                if !line.is_empty() && !is_trailer(line) {
                    return Err(Refused::Malformed);
                }
                let taken = line.len() + 2;
                *self = match line.len() {
                    0 => Self::Length(0),
                    _ => Self::Trailer {
                        len: len + taken as u16,
                    },
                };
                Ok(Some(taken))
            }
        }
    }
}

fn clamp(stream: &[u8], left: u64) -> usize {
    usize::try_from(left).map_or(stream.len(), |left| left.min(stream.len()))
}

/// A line without its end, which contains neither CR nor LF; `None` if its end has not arrived.
fn line(stream: &[u8], most: usize) -> Result<Option<&[u8]>, Refused> {
    let end = stream.iter().position(|b| matches!(b, b'\r' | b'\n'));
    match end {
        Some(end) if end + 2 > most => Err(Refused::TooLong),
        Some(end) => match stream[end..] {
            [b'\r', b'\n', ..] => Ok(Some(&stream[..end])),
            [b'\r'] => Ok(None),
            _ => Err(Refused::Malformed),
        },
        None if stream.len() + 2 > most => Err(Refused::TooLong),
        None => Ok(None),
    }
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    let ok = (1..=16).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
    let digits = std::str::from_utf8(digits).ok().filter(|_| ok)?;
    u64::from_str_radix(digits, 16).ok()
}

fn content_length(fields: &[Header<'_>]) -> Result<Option<u64>, Refused> {
    let Some(digits) = only(fields, "content-length")? else {
        return Ok(None);
    };
    let ok = (1..=18).contains(&digits.len())
        && digits.iter().all(u8::is_ascii_digit)
        && (digits[0] != b'0' || digits.len() == 1);
    let text = std::str::from_utf8(digits).ok().filter(|_| ok);
    let length = text.and_then(|text| text.parse().ok());
    length.map(Some).ok_or(Refused::Malformed)
}
