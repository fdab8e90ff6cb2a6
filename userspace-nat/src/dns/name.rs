//! Domain names in wire form: labels with a length octet each, up to the root's zero (RFC 1035
//! section 3.1), at most 255 octets.
use std::fmt;

/// Longest name, octets.
pub const MAX_LEN: usize = 255;

/// A checked, uncompressed name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Name<'n>(pub &'n [u8]);

impl<'n> Name<'n> {
    /// Its labels from the left, without the root's.
    pub fn labels(self) -> impl Iterator<Item = &'n [u8]> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let (&len, tail) = rest.split_first()?;
            let (label, tail) = tail
                .split_at_checked(usize::from(len))
                .filter(|_| len > 0)?;
            rest = tail;
            Some(label)
        })
    }

    /// Presentation form without the dot at the end, as people write names.
    pub fn without_dot(self) -> String {
        let mut text = self.to_string();
        if text.len() > 1 {
            text.pop();
        }
        text
    }
}

/// Presentation form with a dot at the end (RFC 1035 section 5.1; `\DDD` for what is not
/// printable, RFC 4343 section 2.1).
impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut any = false;
        for label in self.labels() {
            any = true;
            for &b in label {
                match b {
                    b'.' | b'\\' => write!(f, "\\{}", b as char)?,
                    b'!'..=b'~' => write!(f, "{}", b as char)?,
                    _ => write!(f, "\\{b:03}")?,
                }
            }
            f.write_str(".")?;
        }
        if any { Ok(()) } else { f.write_str(".") }
    }
}

/// Where the name at `at` ends, if it is whole and uncompressed.
pub(crate) fn end_of_plain(message: &[u8], at: usize) -> Option<usize> {
    let mut end = at;
    loop {
        let len = *message.get(end)?;
        if len > 63 {
            return None;
        }
        end += 1 + usize::from(len);
        if end - at > MAX_LEN {
            return None;
        }
        if len == 0 {
            return Some(end);
        }
    }
}

/// Where the name at `at` ends in place; a compression pointer ends it and is not followed.
pub(super) fn end(message: &[u8], at: usize) -> Option<usize> {
    let mut end = at;
    loop {
        let len = *message.get(end)?;
        match len {
            0 => return Some(end + 1),
            1..=63 => end += 1 + usize::from(len),
            0xc0.. => return message.get(end + 1).map(|_| end + 2),
            _ => return None,
        }
        if end - at > MAX_LEN {
            return None;
        }
    }
}

/// The name at `at` in lower case, its compression pointers followed.
pub(super) fn expand(message: &[u8], at: usize) -> Option<Box<[u8]>> {
    let mut name = expand_as_is(message, at)?;
    // Length octets are below 'A', so the name can be lowered as one string.
    name.make_ascii_lowercase();
    Some(name)
}

/// The name at `at`, its compression pointers followed (RFC 1035 section 4.1.4). Each must lead to
/// an earlier place than the last, so this ends.
pub(super) fn expand_as_is(message: &[u8], at: usize) -> Option<Box<[u8]>> {
    let mut name = Vec::with_capacity(64);
    let (mut at, mut before) = (at, at);
    loop {
        let len = *message.get(at)?;
        match len {
            0 => {
                name.push(0);
                return (name.len() <= MAX_LEN).then(|| name.into());
            }
            1..=63 => {
                let end = at + 1 + usize::from(len);
                name.extend(message.get(at..end)?);
                if name.len() > MAX_LEN {
                    return None;
                }
                at = end;
            }
            0xc0.. => {
                let low = *message.get(at + 1)?;
                let to = usize::from(u16::from_be_bytes([len & 0x3f, low]));
                if to >= before {
                    return None;
                }
                (at, before) = (to, to);
            }
            _ => return None,
        }
    }
}
