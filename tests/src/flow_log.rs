//! Reading of flow logs.

use std::{fs, path::Path};

use serde_json::Value;

use crate::error::{Error, Result, Tried};

/// Returns the records of a flow log that may still be written: what stands behind the last line feed is
/// not a record yet, for a long write is seen a page at a time.
///
/// # Errors
/// The file can't be read, or a line is no record.
pub fn records(log: &Path) -> Result<Vec<Value>> {
    read(log, false)
}

/// The same of a log whose writers were killed: a line may be cut, which the next writer has ended.
///
/// # Errors
/// The file can't be read, or a line is no record nor the beginning of one.
pub fn records_after_kills(log: &Path) -> Result<Vec<Value>> {
    read(log, true)
}

fn read(log: &Path, may_be_cut: bool) -> Result<Vec<Value>> {
    let text = fs::read_to_string(log).tried(format!("read {}", log.display()))?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut records = Vec::new();
    for line in whole.lines() {
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            // So is an empty line: another writer ended the cut one as well.
            Err(error) if may_be_cut && error.is_eof() => {}
            Err(error) => {
                let problem = format!("{error} in the record {line:?} of {}", log.display());
                return Err(Error::unexpected(problem));
            }
        }
    }
    Ok(records)
}
