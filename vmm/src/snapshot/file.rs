//! Format of the state file: a header with the digest, then the state.
use super::{MachineState, SnapshotError, SnapshotId};

/// Version of the layout of [`MachineState`] and of the file.
pub const LAYOUT_VERSION: u32 = 6;
/// Most bytes of a state.
pub const MAX_STATE_BYTES: u64 = 2 << 20;

const MAGIC: &[u8; 8] = b"slipsnap";
const HEADER_BYTES: usize = 48;

/// Returns the bytes of the state file.
///
/// # Errors
/// The state is longer than [`MAX_STATE_BYTES`].
pub fn encode(state: &MachineState) -> Result<Vec<u8>, SnapshotError> {
    let state = postcard::to_stdvec(state)
        .map_err(|e| SnapshotError::Mismatch(format!("its state can't be written ({e})")))?;
    let length = u32::try_from(state.len()).unwrap_or(u32::MAX);
    if u64::from(length) > MAX_STATE_BYTES {
        return Err(SnapshotError::TooLong(length.into()));
    }
    Ok(seal(&state, length))
}

/// Returns the file of an encoded state, with its header.
fn seal(state: &[u8], length: u32) -> Vec<u8> {
    let mut file = Vec::with_capacity(HEADER_BYTES + state.len());
    file.extend_from_slice(MAGIC);
    file.extend_from_slice(&LAYOUT_VERSION.to_le_bytes());
    file.extend_from_slice(&length.to_le_bytes());
    file.extend_from_slice(&SnapshotId::of(state).0);
    file.extend_from_slice(state);
    file
}

/// Returns the file of any bytes as the state, as whoever can write the file could make it.
#[cfg(any(test, feature = "fake"))]
pub fn sealed(state: &[u8]) -> Vec<u8> {
    seal(state, u32::try_from(state.len()).unwrap_or(u32::MAX))
}

/// Returns the id of the snapshot of a state file that was decoded.
pub(super) fn id_of(file: &[u8]) -> SnapshotId {
    SnapshotId::of(file.get(HEADER_BYTES..).unwrap_or_default())
}

/// Returns the state in a state file's bytes.
///
/// # Errors
/// It is no state file, has another layout, or is damaged.
pub fn decode(file: &[u8]) -> Result<MachineState, SnapshotError> {
    let (magic, rest) = file.split_first_chunk().ok_or(SnapshotError::NotAState)?;
    if magic != MAGIC {
        return Err(SnapshotError::NotAState);
    }
    let short = SnapshotError::Damaged("it ends early");
    let Some((version, rest)) = rest.split_first_chunk() else {
        return Err(short);
    };
    // Nothing else is known of another layout.
    let found = u32::from_le_bytes(*version);
    if found != LAYOUT_VERSION {
        return Err(SnapshotError::Version { found });
    }
    let Some((length, rest)) = rest.split_first_chunk() else {
        return Err(short);
    };
    let length = u32::from_le_bytes(*length);
    if u64::from(length) > MAX_STATE_BYTES {
        return Err(SnapshotError::TooLong(length.into()));
    }
    let Some((digest, state)) = rest.split_first_chunk::<32>() else {
        return Err(short);
    };
    match state.len().cmp(&(length as usize)) {
        std::cmp::Ordering::Less => return Err(short),
        std::cmp::Ordering::Greater => {
            return Err(SnapshotError::Damaged("there is more behind its end"));
        }
        std::cmp::Ordering::Equal => {}
    }
    if SnapshotId::of(state).0 != *digest {
        return Err(SnapshotError::Damaged("its digest is of other bytes"));
    }
    match postcard::take_from_bytes(state) {
        Ok((state, [])) => Ok(state),
        _ => Err(SnapshotError::Damaged("it does not say all of a machine")),
    }
}

#[cfg(test)]
#[path = "file_test.rs"]
pub(super) mod tests;
