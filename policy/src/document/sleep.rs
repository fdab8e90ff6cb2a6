//! `[sleep]`: what is held for a VM while it sleeps.
use toml::Spanned;

use super::{error::ConfigError, file::PolicyFile, schema};
use crate::Sleep;

/// Returns the settings of a policy in a file.
///
/// # Errors
/// One is zero, or beyond its maximum.
pub(super) fn of_file(file: &PolicyFile, said: &schema::Sleep) -> Result<Sleep, ConfigError> {
    let mut sleep = Sleep::default();
    let most = Sleep::MOST;
    let keys: [(_, &Option<Spanned<u32>>, _, _); 3] = [
        ("packets", &said.packets, &mut sleep.packets, most.packets),
        ("bytes", &said.bytes, &mut sleep.bytes, most.bytes),
        (
            "patience_s",
            &said.patience_s,
            &mut sleep.patience_s,
            most.patience_s,
        ),
    ];
    for (key, said, value, most) in keys {
        let Some(said) = said else { continue };
        let given = *said.get_ref();
        if !(1..=most).contains(&given) {
            let problem = format!("{key} of [sleep] is {given}");
            return Err(file.error(&said.span(), problem, format!("give 1 to {most}")));
        }
        *value = given;
    }
    Ok(sleep)
}
