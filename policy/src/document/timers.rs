//! `[timers]`: idle time-outs of flows.
use toml::Spanned;

use super::{error::ConfigError, file::PolicyFile, schema};
use crate::Timers;

/// Returns the timers of a policy in a file.
///
/// # Errors
/// One is shorter than the RFCs permit, or longer than a week.
pub(super) fn of_file(file: &PolicyFile, said: &schema::Timers) -> Result<Timers, ConfigError> {
    let mut timers = Timers::default();
    let least = Timers::LEAST;
    let keys: [(_, &Option<Spanned<u32>>, _, _, _); 5] = [
        (
            "tcp_established_s",
            &said.tcp_established_s,
            &mut timers.tcp_established_s,
            least.tcp_established_s,
            "RFC 5382 REQ-5",
        ),
        (
            "tcp_opening_s",
            &said.tcp_opening_s,
            &mut timers.tcp_opening_s,
            least.tcp_opening_s,
            "RFC 5382 REQ-5",
        ),
        (
            "tcp_closing_s",
            &said.tcp_closing_s,
            &mut timers.tcp_closing_s,
            least.tcp_closing_s,
            "RFC 5382 REQ-5",
        ),
        (
            "udp_s",
            &said.udp_s,
            &mut timers.udp_s,
            least.udp_s,
            "RFC 4787 REQ-5",
        ),
        (
            "icmp_s",
            &said.icmp_s,
            &mut timers.icmp_s,
            least.icmp_s,
            "RFC 5508 REQ-2",
        ),
    ];
    for (key, said, timer, least, source) in keys {
        let Some(said) = said else { continue };
        let seconds = *said.get_ref();
        if !(least..=Timers::MOST_S).contains(&seconds) {
            let problem = format!("{key} is {seconds}");
            let remedy = format!("give {least} ({source}) to {} seconds", Timers::MOST_S);
            return Err(file.error(&said.span(), problem, &remedy));
        }
        *timer = seconds;
    }
    Ok(timers)
}
