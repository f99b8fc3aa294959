#!/bin/bash
API_PORT=8000 llamafactory-cli api config.yaml
