//! Starts pods with plain CRI calls: the baseline of `cargo xtask bench`.
//!
//! Usage: `bare_pods SOCKET LOG_DIR IMAGE COUNT`. Prints, for each pod, the wall-clock milliseconds at which its first call
//! began and the milliseconds the calls took; its log is `LOG_DIR/<number>/main.log`. Each pod is removed before the next.

use std::{
    error::Error,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rubelet_cri::{client::CriClient, port::ContainerRuntime, v1};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [socket, log_dir, image, count] = args.as_slice() else {
        return Err("usage: bare_pods SOCKET LOG_DIR IMAGE COUNT".into());
    };
    let client = CriClient::new(socket, "", Duration::from_secs(60))?;
    client.version().await?;
    for number in 0..count.parse()? {
        let began = wall()?;
        let sandbox = start(&client, &format!("{log_dir}/{number}"), image, number).await?;
        println!("{} {}", began.as_millis(), (wall()? - began).as_millis());
        // Lets its line reach the log, so that removal does not disturb the measurement.
        tokio::time::sleep(Duration::from_millis(300)).await;
        client.stop_pod_sandbox(&sandbox).await?;
        client.remove_pod_sandbox(&sandbox).await?;
    }
    Ok(())
}

/// The four calls a pod of one container with a present image needs.
async fn start(client: &CriClient, log_dir: &str, image: &str, number: u32) -> Result<String, Box<dyn Error>> {
    let sandbox_config = v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: format!("bare{number}"),
            uid: format!("bare{number}"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        log_directory: log_dir.to_owned(),
        linux: Some(v1::LinuxPodSandboxConfig::default()),
        ..Default::default()
    };
    let sandbox = client.run_pod_sandbox(&sandbox_config, "").await?;
    let spec = v1::ImageSpec { image: image.to_owned(), ..Default::default() };
    let image = client.image_status(&spec).await?.ok_or("the image is not there")?;
    let config = v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        image: Some(v1::ImageSpec { image: image.id, ..Default::default() }),
        command: ["sh", "-c", "echo start; exec sleep 3600"].map(str::to_owned).to_vec(),
        log_path: "main.log".to_owned(),
        linux: Some(v1::LinuxContainerConfig::default()),
        ..Default::default()
    };
    let container = client.create_container(&sandbox, &config, &sandbox_config).await?;
    client.start_container(&container).await?;
    Ok(sandbox)
}

#[expect(clippy::disallowed_methods, reason = "a measurement, and no part of the agent")]
fn wall() -> Result<Duration, Box<dyn Error>> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?)
}
