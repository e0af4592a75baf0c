//! The files in `docker/`, as far as they can be checked without a container engine: against each
//! other, the repository, the command line and the configuration. They are read at run time.

mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use files::{Compose, Dockerfile, Service, ignored, names, read, root, stanza};
use outbox_tailer::cli::{self, Cli};
use outbox_tailer::config::{self, Config, Overrides};

/// The services that run our image.
const OURS: [&str; 2] = ["init", "worker"];
const CONFIG: &str = "docker/outbox-tailer.toml";

fn arguments(service: &Service) -> Vec<String> {
    let image = Dockerfile::read();
    let entrypoint = service.entrypoint.clone().unwrap_or_else(|| image.words("ENTRYPOINT"));
    let command = service.command.clone().unwrap_or_else(|| image.words("CMD"));
    [entrypoint, command].concat()
}

fn our_variables(service: &Service) -> BTreeMap<String, String> {
    let all = service.environment.iter().map(|(name, value)| (name.clone(), value.text()));
    all.filter(|(name, _)| name.starts_with("OUTBOX_TAILER_")).collect()
}

/// As the program loads it: the command line says which mounted file.
fn configuration(service: &Service) -> Config {
    let cli = Cli::try_parse_from(arguments(service)).unwrap_or_else(|e| panic!("{e}"));
    let target = cli.common.config.as_ref().expect("--config is given").display().to_string();
    let mount = service.mounts().into_iter().find(|m| m.target == target);
    let source = mount.unwrap_or_else(|| panic!("nothing is mounted at {target}")).source;
    assert_eq!(Path::new("docker").join(source.trim_start_matches("./")), Path::new(CONFIG));
    config::load(Some(&root(CONFIG)), our_variables(service).into_iter(), &cli.common.overrides())
        .unwrap_or_else(|e| panic!("{}", e.line()))
}

#[test]
fn what_compose_builds_from_and_mounts_exists() {
    let compose = Compose::read();
    for (name, service) in &compose.services {
        if let Some(build) = &service.build {
            let context = root("docker").join(&build.context);
            assert_eq!(context.canonicalize().unwrap(), root("").canonicalize().unwrap(), "{name}");
            assert!(context.join(&build.dockerfile).is_file(), "{name}: {}", build.dockerfile);
        }
        for mount in service.mounts() {
            if mount.source.starts_with('.') {
                assert!(root("docker").join(&mount.source).exists(), "{name}: {}", mount.source);
                assert_eq!(mount.mode, "ro", "{name}: {}", mount.source);
            } else {
                assert!(compose.volumes.contains_key(&mount.source), "{name}: volume {}", mount.source);
            }
        }
    }
    // What psql includes is mounted, too.
    let postgres = &compose.services["postgres"];
    for included in read("docker/roles.sql").lines().filter_map(|l| l.strip_prefix("\\i ")) {
        let there = postgres.mounts().into_iter().find_map(|m| {
            Some(root("docker").join(m.source).join(included.strip_prefix(&format!("{}/", m.target))?))
        });
        assert!(there.is_some_and(|path| path.is_file()), "roles.sql: {included}");
    }
}

#[test]
fn who_is_waited_for_is_there_and_can_be_waited_for() {
    let compose = Compose::read();
    for (name, service) in &compose.services {
        for (target, how) in &service.depends_on {
            let target = compose.services.get(target).unwrap_or_else(|| panic!("{name} waits for {target}"));
            match how.condition.as_str() {
                "service_healthy" => assert!(target.healthcheck.is_some(), "{name}: no healthcheck"),
                "service_completed_successfully" => {
                    assert!(target.restart.is_none(), "{name} waits for the end of what never ends");
                }
                other => panic!("{name}: {other}"),
            }
        }
    }
    let order = |name: &str| names(compose.services[name].depends_on.keys());
    assert!(order("worker").contains("init"), "no slot without init");
    assert!(order("init").contains("postgres"));
}

#[test]
fn what_the_image_is_built_from_exists_and_is_not_ignored() {
    for source in Dockerfile::read().copied() {
        assert!(root(&source).exists(), "COPY {source}");
        assert!(!ignored(&source), "COPY {source}: .dockerignore keeps it out");
    }
    for secret in ["docker/secrets/tailer", ".git", ".dev", "target"] {
        assert!(ignored(secret), "{secret} must not be sent to the builder");
    }
}

/// The build command with cargo's own eyes, without the compiling.
#[test]
fn cargo_accepts_the_build_command_on_what_is_copied() {
    let image = Dockerfile::read();
    let build = image.cargo_build();
    for flag in ["--release", "--locked"] {
        assert!(build.iter().any(|word| word == flag), "{flag} is missing: {build:?}");
    }
    let place = std::env::temp_dir().join(format!("outbox-tailer-image-{}", std::process::id()));
    std::fs::create_dir_all(&place).unwrap();
    for source in image.copied() {
        let copied = Command::new("cp").arg("-r").arg(root(&source)).arg(&place).status().unwrap();
        assert!(copied.success());
    }
    let features = build.iter().skip_while(|word| *word != "--features").nth(1).expect("--features");
    // `metadata` alone would not look into the lock file; `tree` resolves it for this platform.
    for arguments in [&["metadata", "--no-deps", "--format-version=1"][..], &["tree", "--edges=normal,build"]]
    {
        let output = Command::new(env!("CARGO"))
            .args(arguments)
            .args(["--locked", "--features", features])
            .current_dir(&place)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        if arguments[0] == "tree" {
            let tree = String::from_utf8_lossy(&output.stdout);
            assert!(tree.contains("openssl-src"), "the final image has no OpenSSL to link with");
        }
    }
    // What the sources include by path, cargo does not know.
    let mut included = 0;
    for path in files::below(&place.join("src")) {
        let text = std::fs::read_to_string(&path).unwrap();
        for (macro_name, base) in
            [("embed_migrations!(\"", place.as_path()), ("include_str!(\"", path.parent().unwrap())]
        {
            for rest in text.split(macro_name).skip(1) {
                let path = base.join(rest.split('"').next().unwrap());
                assert!(path.exists(), "{}", path.display());
                included += 1;
            }
        }
    }
    assert!(included > 0);
    std::fs::remove_dir_all(&place).unwrap();
    let bin = build.iter().skip_while(|word| *word != "--bin").nth(1).expect("--bin");
    assert_eq!(Path::new(&image.words("ENTRYPOINT")[0]).file_name().unwrap(), bin.as_str());
}

#[test]
fn the_base_images_fit() {
    let [build, last] = &Dockerfile::read().stages()[..] else { panic!("two stages") };
    let manifest: toml::Table = read("Cargo.toml").parse().unwrap();
    let needed = manifest["package"]["rust-version"].as_str().unwrap();
    let tag = build.strip_prefix("rust:").expect("a rust image");
    let given = tag.split('-').next().unwrap();
    assert!(files::version(given) >= files::version(needed), "{build} is older than {needed}");
    // A binary runs on the glibc it was linked with, or a newer one.
    let debian = ["bookworm", "trixie", "forky"].into_iter().zip(12..);
    let debian = debian.into_iter().find(|(name, _)| tag.ends_with(name)).expect("a named Debian").1;
    assert!(last.contains(&format!("cc-debian{debian}")), "{last} is not Debian {debian}, as {build} is");
    // The servers are the ones that the tests run on.
    let compose = Compose::read();
    let kafka = read("scripts/kafka-pom.xml");
    let kafka = kafka.split("<dependency>").find(|d| d.contains("<groupId>org.apache.kafka<")).unwrap();
    let kafka = kafka.split("<version>").nth(1).unwrap().split('<').next().unwrap();
    for name in ["kafka", "topic"] {
        assert_eq!(compose.services[name].image, format!("apache/kafka:{kafka}"));
    }
    let postgres = compose.services["postgres"].image.strip_prefix("postgres:").expect("the official image");
    assert!(read("scripts/postgres.sh").contains(&format!("# VERSION is {postgres}.")), "{postgres}");
}

#[test]
fn the_worker_is_not_root_and_may_do_little() {
    let image = Dockerfile::read();
    let user = image.words("USER");
    let ids: Vec<u32> = user[0].split(':').map(|id| id.parse().expect("a number")).collect();
    assert!(ids.len() == 2 && ids.iter().all(|id| *id > 0), "{user:?}");
    let compose = Compose::read();
    for name in OURS {
        let service = &compose.services[name];
        assert!(service.user.is_none(), "{name}: the image's user");
        assert!(service.read_only, "{name}: read_only");
        assert_eq!(service.cap_drop, ["ALL"], "{name}: cap_drop");
        assert_eq!(service.security_opt, ["no-new-privileges:true"], "{name}: security_opt");
    }
}

#[test]
fn the_commands_are_the_programs() {
    let compose = Compose::read();
    let parsed = |arguments: Vec<String>| {
        Cli::try_parse_from(&arguments).unwrap_or_else(|e| panic!("{arguments:?}: {e}")).command
    };
    let image = Dockerfile::read();
    assert!(matches!(parsed([image.words("ENTRYPOINT"), image.words("CMD")].concat()), cli::Command::Run(_)));
    assert!(matches!(parsed(arguments(&compose.services["worker"])), cli::Command::Run(_)));
    assert!(matches!(parsed(arguments(&compose.services["init"])), cli::Command::Init(_)));
    // And the program that was built says the same as the library.
    for name in OURS {
        let words = &arguments(&compose.services[name])[1..];
        let help =
            Command::new(env!("CARGO_BIN_EXE_outbox-tailer")).args(words).arg("--help").output().unwrap();
        assert!(help.status.success(), "{name}: {}", String::from_utf8_lossy(&help.stderr));
    }
}

#[test]
fn the_configuration_knows_every_variable_and_key() {
    let compose = Compose::read();
    let refused = |file: &str, env: &[(String, String)], key: &str| {
        let path = std::env::temp_dir().join(format!("outbox-tailer-docker-{}.toml", std::process::id()));
        std::fs::write(&path, file).unwrap();
        let loaded = config::load(Some(&path), env.iter().cloned(), &Overrides::default());
        let said = loaded.expect_err(&format!("a misspelt {key} goes through")).line();
        std::fs::remove_file(&path).unwrap();
        assert!(said.contains(&format!("did you mean `{key}`?")), "{said}");
    };
    let text = read(CONFIG);
    let command = Cli::command();
    let flags: BTreeSet<String> =
        command.get_arguments().filter_map(|a| Some(a.get_env()?.to_str()?.to_owned())).collect();
    let mut keys = 0;
    for name in OURS {
        let service = &compose.services[name];
        configuration(service);
        for (variable, value) in our_variables(service) {
            if flags.contains(&variable) {
                // Taken by the command line, so that the missing file is what it complains about.
                let taken = Command::new(env!("CARGO_BIN_EXE_outbox-tailer"))
                    .args(["--config", "/nowhere", "run"])
                    .env_clear()
                    .env(&variable, &value)
                    .output()
                    .unwrap();
                let said = String::from_utf8_lossy(&taken.stderr);
                assert!(said.contains("/nowhere"), "{variable}={value}: {said}");
            } else {
                // An unknown name outside the sections is not ours to refuse; one letter more shows
                // that this one is known.
                refused(&text, &[(format!("{variable}X"), value)], &variable);
            }
        }
    }
    for line in text.lines() {
        if let Some((key, _)) = line.split_once(" = ") {
            refused(&text.replace(line, &line.replacen(key, &format!("{key}x"), 1)), &[], key);
            keys += 1;
        }
    }
    assert!(keys > 4);
}

#[test]
fn addresses_ports_and_names_agree() {
    let compose = Compose::read();
    let roles = read("docker/roles.sql");
    let kafka = &compose.services["kafka"];
    let advertised = kafka.environment["KAFKA_ADVERTISED_LISTENERS"].text();
    let brokers = advertised.strip_prefix("PLAINTEXT://").unwrap();
    let (host, port) = brokers.split_once(':').unwrap();
    assert!(compose.services.contains_key(host), "{brokers}");
    let listeners = kafka.environment["KAFKA_LISTENERS"].text();
    let listeners: Vec<&str> = listeners.split(',').collect();
    assert!(listeners.contains(&format!("PLAINTEXT://:{port}").as_str()), "{listeners:?}");
    let voters = kafka.environment["KAFKA_CONTROLLER_QUORUM_VOTERS"].text();
    let (id, controller) = voters.split_once('@').unwrap();
    assert_eq!(id, kafka.environment["KAFKA_NODE_ID"].text());
    assert!(compose.services.contains_key(controller.split(':').next().unwrap()), "{voters}");
    let controller_port = controller.split(':').nth(1).unwrap();
    assert!(listeners.contains(&format!("CONTROLLER://:{controller_port}").as_str()), "{listeners:?}");

    let topic = arguments(&compose.services["topic"]);
    let after = |words: &[String], flag: &str| {
        let at = words.iter().position(|word| word == flag).unwrap_or_else(|| panic!("{flag}: {words:?}"));
        words[at + 1].clone()
    };
    let health = |name: &str| compose.services[name].healthcheck.as_ref().unwrap().test.clone();
    assert_eq!(after(&topic, "--bootstrap-server"), brokers);
    assert_eq!(after(&health("kafka"), "--bootstrap-server"), brokers);

    let postgres = &compose.services["postgres"];
    let database = postgres.environment["POSTGRES_DB"].text();
    for name in OURS {
        let config = configuration(&compose.services[name]);
        assert_eq!(config.kafka.brokers, brokers, "{name}");
        assert_eq!(config.tables[0].topic, after(&topic, "--topic"), "{name}");
        let url = &config.postgres.url;
        assert_eq!(url.get_hosts(), [tokio_postgres::config::Host::Tcp("postgres".to_owned())], "{name}");
        // The image's own port.
        assert_eq!(url.get_ports(), [5432], "{name}");
        assert_eq!(url.get_dbname(), Some(database.as_str()), "{name}");
        let role = format!("CREATE ROLE {} LOGIN REPLICATION", url.get_user().unwrap());
        assert!(roles.contains(&role), "{name}: {role}");
        let tls = config.postgres.tls.mode;
        assert_eq!(tls, Some(config::TlsMode::Disable), "{name}: these servers have none");
    }
    assert!(health("postgres").contains(&"--port=5432".to_owned()));
    assert!(health("postgres").contains(&format!("--dbname={database}")));
    assert!(roles.contains(&format!("ALTER DATABASE {database} OWNER")));
    let command = postgres.command.as_ref().unwrap();
    assert!(command.contains(&"wal_level=logical".to_owned()), "{command:?}");
}

/// A secret is a file that git and the builder never see, given to those who read it and no others.
#[test]
fn secrets_are_given_to_who_reads_them() {
    let compose = Compose::read();
    let read_by = |name: &str, service: &Service| {
        let mut texts: Vec<String> = service.environment.values().map(files::Scalar::text).collect();
        if OURS.contains(&name) {
            let config = configuration(service);
            // The file is not here: the complaint names the one that would be read.
            texts = vec![config.postgres.password().expect_err("no secret is here").line()];
        } else {
            let scripts =
                service.mounts().into_iter().filter(|m| m.target.starts_with("/docker-entrypoint-initdb.d/"));
            texts.extend(scripts.map(|m| read(&format!("docker/{}", m.source.trim_start_matches("./")))));
        }
        let word = |rest: &str| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap().to_owned();
        texts.iter().flat_map(|t| t.split("/run/secrets/").skip(1)).map(word).collect::<BTreeSet<String>>()
    };
    for (name, service) in &compose.services {
        assert_eq!(names(&service.secrets), read_by(name, service), "{name}");
    }
    let used: BTreeSet<String> = compose.services.values().flat_map(|s| s.secrets.iter().cloned()).collect();
    assert_eq!(names(compose.secrets.keys()), used);
    let how = stanza("README.md", "### In containers");
    for (name, secret) in &compose.secrets {
        assert_eq!(secret.file, format!("./secrets/{name}"));
        assert!(ignored(&format!("docker/secrets/{name}")));
        let made = how.lines().find(|line| line.contains("docker/secrets/")).expect("README makes them");
        assert!(made.split([' ', ';']).any(|word| word == name), "README does not make {name}");
    }
    assert!(read(".gitignore").lines().any(|line| line == "/docker/secrets"));
}

#[test]
fn the_worker_is_granted_what_the_readme_says() {
    let grants = |text: &str| -> BTreeSet<String> {
        text.lines().filter(|line| line.starts_with("GRANT ")).map(str::to_owned).collect()
    };
    let given = grants(&read("docker/roles.sql"));
    assert_eq!(given, grants(&stanza("README.md", "### Roles")));
    assert!(!given.is_empty());
    let migrations = std::fs::read_dir(root("migrations/worker")).unwrap();
    for file in migrations.map(|f| f.unwrap().file_name().into_string().unwrap()) {
        assert!(read("docker/roles.sql").contains(&file), "roles.sql does not apply {file}");
    }
}

#[test]
fn the_worker_has_time_to_stop() {
    let worker = &Compose::read().services["worker"];
    let grace = worker.stop_grace_period.as_ref().expect("docker's 10 s are too short");
    let grace = Duration::from_secs(grace.strip_suffix('s').unwrap().parse().unwrap());
    assert!(grace >= configuration(worker).worker.shutdown_timeout + Duration::from_secs(5));
}
