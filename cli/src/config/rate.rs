//! Rate limits of the machine's devices, as flags give them: `N[/TIME][+BURST]`.
use std::ops::RangeInclusive;

use slipgate_ipc::vmm::{NetRates, RateLimit, TokenBucket};
use slipgate_policy::document::ConfigError;

use crate::args::{RunArgs, in_units};

/// Permitted sizes and bursts of a bucket.
const TOKENS: RangeInclusive<u64> = 1..=1 << 40;
/// Permitted times in which a bucket fills, ms: to an hour.
const REFILL_MS: RangeInclusive<u64> = 1..=3_600_000;
const FORM: &str = "give N, N/TIME or N/TIME+BURST: 1000 is 1,000 a second, 100/100ms the same with \
                    a hundred at once, and +5000 as many more once, at the beginning";
const BYTE_UNITS: &[(char, u64)] = &[('k', 1 << 10), ('m', 1 << 20), ('g', 1 << 30)];

/// Limits of the network card: those of the flags, or those it had.
pub(super) fn of_card(args: &RunArgs, before: NetRates) -> Result<NetRates, ConfigError> {
    let limit = |flag, given: &Option<String>, before| match given {
        Some(text) => direction(flag, text),
        None => Ok(before),
    };
    Ok(NetRates {
        tx: limit("--net-rate-tx", &args.net_rate_tx, before.tx)?,
        rx: limit("--net-rate-rx", &args.net_rate_rx, before.rx)?,
    })
}

fn direction(flag: &'static str, text: &str) -> Result<RateLimit, ConfigError> {
    let mut limit = RateLimit::default();
    for part in text.split(',') {
        let known = match part.split_once('=') {
            Some(("bandwidth", rate)) => set(&mut limit.bytes, flag, part, rate, BYTE_UNITS)?,
            Some(("packets", rate)) => set(&mut limit.operations, flag, part, rate, &[])?,
            _ => false,
        };
        if !known {
            let problem = "it is neither bandwidth= nor packets=";
            let remedy = "give one or both, like bandwidth=10M,packets=5000";
            return Err(ConfigError::new(flag, text, problem, remedy));
        }
    }
    Ok(limit)
}

/// Takes an option of `--disk` that is a limit. Returns whether it is one.
pub(super) fn set_of_disk(limit: &mut RateLimit, option: &str) -> Result<bool, ConfigError> {
    match option.split_once('=') {
        Some(("iops", rate)) => set(&mut limit.operations, "--disk", option, rate, &[]),
        Some(("bandwidth", rate)) => set(&mut limit.bytes, "--disk", option, rate, BYTE_UNITS),
        _ => Ok(false),
    }
}

fn set(
    bucket: &mut Option<TokenBucket>,
    flag: &'static str,
    option: &str,
    rate: &str,
    units: &[(char, u64)],
) -> Result<bool, ConfigError> {
    let refused = |problem: &str| ConfigError::new(flag, option, problem.to_owned(), FORM);
    if bucket.is_some() {
        return Err(refused("it is given twice"));
    }
    let (rate, burst) = match rate.split_once('+') {
        Some((rate, burst)) => (rate, Some(burst)),
        None => (rate, None),
    };
    let (size, time) = rate.split_once('/').unwrap_or((rate, "1s"));
    let number = |text| in_units(text, units).filter(|number| TOKENS.contains(number));
    let size = number(size).ok_or_else(|| refused("it is no rate, or out of reach"))?;
    let refill_ms = milliseconds(time)
        .ok_or_else(|| refused("its time is not one from 1ms to 1h (100ms, 1s, 1m)"))?;
    let one_time_burst = match burst {
        Some(text) => number(text).ok_or_else(|| refused("its burst is no number"))?,
        None => 0,
    };
    *bucket = Some(TokenBucket {
        size,
        refill_ms,
        one_time_burst,
    });
    Ok(true)
}

/// `100ms`, `2s`, `1m`, `1h`, or a unit alone: one of it.
fn milliseconds(text: &str) -> Option<u64> {
    let units = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];
    let of = |&(unit, size): &(&str, u64)| Some((text.strip_suffix(unit)?, size));
    let (number, size) = units.iter().find_map(of)?;
    let number = if number.is_empty() {
        1
    } else {
        number.parse().ok()?
    };
    Some(size.checked_mul(number)?).filter(|time| REFILL_MS.contains(time))
}

#[cfg(test)]
#[path = "rate_test.rs"]
mod tests;
