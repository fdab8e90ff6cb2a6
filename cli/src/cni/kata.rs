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
    let mut devices = others(&file, attachment)?;
    devices.push(device);
    write(folder, &file, &json!({"netns": netns, "devices": devices}))
}

/// Takes the attachment's TAP out, and the file away with the last.
pub(super) fn remove(folder: &Path, attachment: &Attachment) -> Result<(), Failure> {
    let file = file(folder, attachment);
    let Some(mut sandbox) = read(&file)? else {
        return Ok(());
    };
    let devices = others(&file, attachment)?;
    if devices.is_empty() {
        return match fs::remove_file(&file) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed("removing", &file, &e)),
            _ => Ok(()),
        };
    }
    sandbox["devices"] = devices.into();
    write(folder, &file, &sandbox)
}

/// The file's devices without the attachment's.
fn others(file: &Path, attachment: &Attachment) -> Result<Vec<Value>, Failure> {
    let sandbox = read(file)?.unwrap_or_default();
    let mut devices = sandbox["devices"].as_array().cloned().unwrap_or_default();
    devices.retain(|device| device["name"] != attachment.ifname);
    Ok(devices)
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
fn write(folder: &Path, file: &Path, sandbox: &Value) -> Result<(), Failure> {
    let new = file.with_extension("json-new");
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&new, format!("{sandbox:#}\n")))
        .and_then(|()| fs::rename(&new, file))
        .map_err(|e| failed("writing", file, &e))
}

fn failed(what: &str, file: &Path, e: &dyn std::error::Error) -> Failure {
    let what = format!("{what} the sandbox's file {} for Kata", file.display());
    Failure::new(code::IO, what).because(e)
}
