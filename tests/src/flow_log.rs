//! Reading of flow logs.

use std::{fs, path::Path};

use serde_json::Value;

use crate::error::{Error, Result, Tried};

/// Returns the records of a flow log that may still be written: what stands behind the last line feed is
/// not a record yet, for a long write is seen a page at a time. Nor is a line that its writer was killed
/// in, which its successor has ended.
///
/// # Errors
/// The file can't be read, or a line is no record nor the beginning of one.
pub fn records(log: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(log).tried(format!("read {}", log.display()))?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let mut records = Vec::new();
    for line in whole.lines().filter(|line| !line.is_empty()) {
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            Err(error) if error.is_eof() => {}
            Err(error) => {
                let problem = format!("{error} in the record {line:?} of {}", log.display());
                return Err(Error::unexpected(problem));
            }
        }
    }
    Ok(records)
}
