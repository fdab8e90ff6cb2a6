//! Domain names in wire form: labels with a length octet each, up to the root's zero (RFC 1035
//! section 3.1), at most 255 octets.
use std::fmt;

/// Length of the longest name in wire form, octets.
pub const MAX_LEN: usize = 255;

/// A valid, uncompressed name in wire form.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Name<'n>(pub &'n [u8]);

impl<'n> Name<'n> {
    /// Returns the labels from left to right, without the root's.
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

    /// Returns the presentation form without the final dot, as people write names.
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
