//! Files of Kata Containers' Directly Attachable Network: a file for each sandbox lists the TAPs that
//! its VMM is to open.
use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{
    answer::{Address, Failure, code},
    request::Attachment,
};

/// Adds the attachment's TAP to the sandbox's file, or replaces it.
pub(super) fn add(
    folder: &Path,
    attachment: &Attachment,
    address: &Address,
    netns: &str,
    is_multi_queue: bool,
) -> Result<(), Failure> {
    let mut tap = json!({"type": "host-tap", "tap_name": address.tap, "queue_size": 256});
    if !is_multi_queue {
        tap["queue_num"] = 1.into();
    }
    let device = json!({
        "name": attachment.ifname,
        "guest_mac": address.mac,
        "device": tap,
        "network_info": {
            "interface": {
                "ip_addresses": [address.cidr()],
                "mtu": address.mtu,
                "ntype": "tuntap",
            },
            // Without a destination: the default route.
            "routes": [{"dest": "", "gateway": address.network.gateway}],
            "neighbors": [],
        },
    });
    let file = file(folder, attachment);
    let before = read(&file)?.unwrap_or_default();
    let mut devices = before["devices"].as_array().cloned().unwrap_or_default();
    devices.retain(|device| device["name"] != attachment.ifname);
    devices.push(device);
    fs::create_dir_all(folder).map_err(|e| failed("making the folder of", &file, &e))?;
    write(&file, &json!({"netns": netns, "devices": devices}))
}

/// Takes the attachment's TAP out, and the file away with the last.
pub(super) fn remove(folder: &Path, attachment: &Attachment) -> Result<(), Failure> {
    let is_its = |device: &Value| device["name"] == attachment.ifname;
    remove_from(&file(folder, attachment), is_its)
}

/// Takes a TAP out of whichever file lists it, for an attachment of which only the TAP is known.
pub(super) fn remove_tap(folder: &Path, tap: &str) -> Result<(), Failure> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(|e| failed("looking for", folder, &e))?,
    };
    for entry in entries {
        let file = entry.map_err(|e| failed("looking for", folder, &e))?.path();
        if file.extension().is_some_and(|it| it == "json") {
            remove_from(&file, |device| device["device"]["tap_name"] == tap)?;
        }
    }
    Ok(())
}

/// Takes devices out of a file, and the file away with the last.
fn remove_from(file: &Path, is_removed: impl Fn(&Value) -> bool) -> Result<(), Failure> {
    let Some(mut sandbox) = read(file)? else {
        return Ok(());
    };
    let Some(devices) = sandbox["devices"].as_array_mut() else {
        return Ok(());
    };
    let before = devices.len();
    devices.retain(|device| !is_removed(device));
    if devices.is_empty() {
        return match fs::remove_file(file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed("removing", file, &e)),
            _ => Ok(()),
        };
    }
    match devices.len() == before {
        true => Ok(()),
        false => write(file, &sandbox),
    }
}

fn file(folder: &Path, attachment: &Attachment) -> PathBuf {
    folder.join(format!("{}.json", attachment.container))
}

fn read(file: &Path) -> Result<Option<Value>, Failure> {
    match fs::read(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(failed("reading", file, &e)),
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|e| failed("reading", file, &e)),
    }
}

/// Writes the whole file at once: Kata may read it meanwhile.
fn write(file: &Path, sandbox: &Value) -> Result<(), Failure> {
    let new = file.with_extension("json-new");
    fs::write(&new, format!("{sandbox:#}\n"))
        .and_then(|()| fs::rename(&new, file))
        .map_err(|e| failed("writing", file, &e))
}

fn failed(what: &str, file: &Path, e: &dyn std::error::Error) -> Failure {
    let what = format!("{what} the sandbox's file {} for Kata", file.display());
    Failure::new(code::IO, what).because(e)
}

#[cfg(test)]
#[path = "kata_test.rs"]
mod tests;
