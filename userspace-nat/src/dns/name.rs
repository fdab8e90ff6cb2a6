//! Domain names in messages: in wire form, possibly compressed (RFC 1035 section 4.1.4).
pub use slipgate_policy::{MAX_NAME_LEN as MAX_LEN, Name};

/// Offset after the uncompressed name at `at`; `None` if it is incomplete or compressed.
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

/// Offset after the name at `at` in place. A compression pointer ends the name and is not followed.
/// `None` if it is incomplete.
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

/// The name at `at` in lower case, with its compression pointers followed; `None` if it is
/// malformed.
pub(super) fn expand(message: &[u8], at: usize) -> Option<Box<[u8]>> {
    let mut name = expand_as_is(message, at)?;
    // Length octets are below 'A', so the name can be lowered as one string.
    name.make_ascii_lowercase();
    Some(name)
}

/// The name at `at` with its compression pointers followed (RFC 1035 section 4.1.4). Each pointer
/// must lead to an earlier offset than the last, so the loop ends. `None` if the name is malformed.
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
