//! The machine's disks, as flags give them: `FILE[,ro][,cache=MODE][,iops=N][,bandwidth=BYTES]`.
use slipgate_broker::config::{DiskSpec, MAX_DISKS};
use slipgate_ipc::vmm::{DiskCache, RateLimit};
use slipgate_policy::document::ConfigError;

use super::rate;

/// Parses the disks of `--disk`.
pub(super) fn disks(given: &[String]) -> Result<Vec<DiskSpec>, ConfigError> {
    if let Some(beyond) = given.get(MAX_DISKS) {
        let problem = format!("a machine has {MAX_DISKS} disks at most");
        return Err(ConfigError::new(
            "--disk",
            beyond,
            problem,
            "leave some out",
        ));
    }
    given.iter().map(|text| disk(text)).collect()
}

/// Parses a disk. Its options are taken from the end: a file's name may have commas.
fn disk(text: &str) -> Result<DiskSpec, ConfigError> {
    let (mut path, mut read_only, mut cache) = (text, false, None);
    let mut rate = RateLimit::default();
    while let Some((before, option)) = path.rsplit_once(',') {
        let known = match option.split_once('=') {
            None if option == "ro" => {
                read_only = true;
                true
            }
            Some(("cache", mode)) => {
                let mode = self::cache(option, mode)?;
                if cache.replace(mode).is_some() {
                    let problem = "the cache is given twice";
                    return Err(ConfigError::new("--disk", text, problem, "leave one out"));
                }
                true
            }
            _ => rate::set_of_disk(&mut rate, option)?,
        };
        if !known {
            break;
        }
        path = before;
    }
    if path.is_empty() {
        let problem = "there is no file in it";
        let remedy = "give a raw image, like disk.img or disk.img,ro";
        return Err(ConfigError::new("--disk", text, problem, remedy));
    }
    if let (true, Some(DiskCache::WriteThrough | DiskCache::Unsafe)) = (read_only, cache) {
        let problem = "a disk that is read-only has no writes to be stable";
        let remedy = "leave out cache= (cache=none is possible), or ,ro";
        return Err(ConfigError::new("--disk", text, problem, remedy));
    }
    Ok(DiskSpec {
        path: path.into(),
        read_only,
        cache: cache.unwrap_or_default(),
        rate,
    })
}

fn cache(option: &str, mode: &str) -> Result<DiskCache, ConfigError> {
    match mode {
        "writeback" => Ok(DiskCache::WriteBack),
        "writethrough" => Ok(DiskCache::WriteThrough),
        "unsafe" => Ok(DiskCache::Unsafe),
        "none" => Ok(DiskCache::None),
        _ => {
            let problem = "there is no such cache mode";
            let remedy = "give writeback (stable with the guest's flush), writethrough (before each \
                          answer), unsafe (when the host likes) or none (as writeback, without the \
                          host's page cache)";
            Err(ConfigError::new("--disk", option, problem, remedy))
        }
    }
}

#[cfg(test)]
#[path = "disk_test.rs"]
mod tests;
