//! Detection of request content that could be read as a request.
//!
//! Some servers ignore a request's length on some of their paths ("CL.0"), and take its content for
//! the next request. So content must not begin as a request does: with a line of a method, a target
//! and a version. Empty lines before it are skipped, as servers do (RFC 9112 section 2.2). A target
//! may contain blanks, which some servers accept. Without the end of that line no server has a
//! request.

/// State of the content's first line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Beginning {
    /// In empty lines and blanks before it.
    #[default]
    Blank,
    /// In the first word.
    Method,
    /// After the first word, this many octets into a blank and a version.
    Version(u8),
    /// The content does not begin as a request.
    Other,
}

/// Pattern of a blank and a version; `0` stands for any digit.
const VERSION: &[u8] = b" HTTP/0.0";

impl Beginning {
    /// Takes more of the content in: as much of it as there is before a request's first line ends.
    pub fn take(&mut self, content: &[u8]) -> usize {
        let ends = content.iter().position(|octet| self.ends_line(*octet));
        ends.unwrap_or(content.len())
    }

    /// Takes an octet in, unless it is the one that ends a request's first line.
    fn ends_line(&mut self, octet: u8) -> bool {
        let is_blank = matches!(octet, b' ' | b'\t');
        let is_line_end = matches!(octet, b'\r' | b'\n');
        let whole = VERSION.len() as u8;
        *self = match *self {
            Self::Other => Self::Other,
            Self::Blank if is_blank || is_line_end => Self::Blank,
            Self::Blank | Self::Method if is_token(octet) => Self::Method,
            Self::Method if is_blank => Self::Version(1),
            Self::Blank | Self::Method => Self::Other,
            Self::Version(at) if at >= whole && is_line_end => return true,
            Self::Version(_) if is_line_end => Self::Other,
            // The line may end behind blanks, or another version may follow.
            Self::Version(at) if at >= whole && is_blank => Self::Version(whole + 1),
            Self::Version(at) if at > whole && is(octet, VERSION[1]) => Self::Version(2),
            Self::Version(at) if VERSION.get(usize::from(at)).is_some_and(|v| is(octet, *v)) => {
                Self::Version(at + 1)
            }
            Self::Version(_) => Self::Version(u8::from(is_blank)),
        };
        false
    }
}

fn is(octet: u8, of_version: u8) -> bool {
    match of_version {
        b'0' => octet.is_ascii_digit(),
        letter => octet.eq_ignore_ascii_case(&letter),
    }
}

/// Whether an octet may be in a token (RFC 9110 section 5.6.2).
fn is_token(octet: u8) -> bool {
    octet.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&octet)
}
